"""The settings of gRPC connections: the sizes that a peer may send, and the detection of silent peers."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.settings import authority
from tidemill.kvstore.files import read_regular

FRAME_BYTES_MAX = 16 * 2**20
"""A prompt of a million tokens is 3 MB; a full announcement of a million pages is 8 MB."""

PEM_BYTES_MAX = 2**20
METADATA_BYTES_MAX = 8 * 2**10
STREAMS_MAX = 1024
"""The maximum number of open streams and calls of a worker: one stream per edge."""

ROUTER_STREAMS_MAX = 16_384
"""The same for a router: one stream per worker, and a call per request in placement."""

SILENCE_MS = 1000
SILENCE_ANSWER_MS = 2000
"""The keepalive: a connection that was silent for SILENCE_MS is pinged, and closed SILENCE_ANSWER_MS later.
So a frozen process or a lost machine is noticed within 3 s, a killed process immediately."""

CONNECT_MS_MAX = 3000

_LIMITS = [
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", SILENCE_MS),
    ("grpc.keepalive_timeout_ms", SILENCE_ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", SILENCE_ANSWER_MS),
    ("grpc.http2.max_pings_without_data", 0),
]


def read_pem(path: Path) -> bytes:
    """Return the content of a file of keys or certificates. Raises OSError."""
    return read_regular(path, PEM_BYTES_MAX)


def open_channel(address: str, tls: MutualTls | None = None) -> grpc.aio.Channel:
    """Open a separate connection to `address` (host:port), without proxy and without back-off from earlier
    ones. Raises OSError when the files of `tls` cannot be read."""
    options = [
        *_LIMITS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS_MAX),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(read_pem(tls.ca), read_pem(tls.key), read_pem(tls.certificate))
    return grpc.aio.secure_channel(
        address, credentials, [*options, ("grpc.ssl_target_name_override", CLUSTER_NAME)]
    )


def unary(channel: grpc.aio.Channel, method: str) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
    """Return a method of the other end, `tidemill.Router/Place`."""
    return channel.unary_unary(f"/{method}")


@contextmanager
def cancellable() -> Generator[None]:
    """Raise the cancellation of this task, also by a timeout, if a call in the block fails while it is
    cancelled: gRPC raises only the error, and a caller that retries would never end."""
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError from error
        raise


def connection_broke(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the connection failed, in contrast to an answer of the peer. gRPC has three codes for
    it: INTERNAL when a call was sending (no server of ours answers it), and in rare cases UNKNOWN
    (https://github.com/grpc/grpc/issues/34076)."""
    is_removed = (error.details() or "").startswith("Stream removed")
    return is_removed or error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}


def new_server(streams_max: int = STREAMS_MAX) -> grpc.aio.Server:
    """Return a server. Calls beyond `streams_max` fail with RESOURCE_EXHAUSTED. Calls that arrive faster than
    they are accepted fail with CANCELLED beyond a queue of the same length."""
    return grpc.aio.server(
        options=[
            *_LIMITS,
            ("grpc.so_reuseport", 0),  # two incarnations of a worker never share a port
            ("grpc.http2.min_ping_interval_without_data_ms", SILENCE_MS // 2),
            ("grpc.server.max_pending_requests", streams_max),
            ("grpc.server.max_pending_requests_hard_limit", streams_max),
        ],
        maximum_concurrent_rpcs=streams_max,
    )


def server_credentials(tls: MutualTls | None) -> grpc.ServerCredentials | None:
    """Return the credentials for `bind`, which admit only processes of the cluster. Raises OSError."""
    if tls is None:
        return None
    pair = (read_pem(tls.key), read_pem(tls.certificate))
    return grpc.ssl_server_credentials([pair], read_pem(tls.ca), require_client_auth=True)


def bind(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Bind to `host`, port 0 for any free one. Return the address for other processes. Raises OSError."""
    address = authority(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:  # gRPC raises it for every reason
        raise OSError(f"{address} cannot be bound: {error}") from error
    return authority(host, bound)
