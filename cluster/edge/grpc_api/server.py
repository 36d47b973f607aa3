"""The public gRPC server: its limits, certificates and services."""

import socket
from collections.abc import Sequence

import grpc.aio
from grpc_reflection.v1alpha import reflection

from tidemill.cluster.edge.grpc_api import generation, health
from tidemill.cluster.edge.grpc_api.call_shares import CallShares
from tidemill.cluster.edge.grpc_api.frames import FrameGate
from tidemill.cluster.edge.grpc_api.generation import Generation
from tidemill.cluster.edge.grpc_api.health import Health
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.cluster.edge.requests.security import Tls

METADATA_BYTES_MAX = 16 << 10
CONNECTION_STREAMS_MAX = 1024
CONNECTIONS_MAX = 2048
"""The most connections, of which one client alone gets half. Each takes some 46 KiB with its first call, and
a client of HTTP/2 needs few."""

HANDSHAKE_MS_MAX = 10_000
IDLE_MS_MAX = 600_000
"""An idle connection is closed after this time; clients open another when they need one."""

SILENCE_MS = 30_000
SILENCE_ANSWER_MS = 20_000
"""A client that was silent for SILENCE_MS during a call is pinged, and disconnected after
SILENCE_ANSWER_MS."""

_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", BODY_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # answers may be of any length
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
    ("grpc.max_connection_idle_ms", IDLE_MS_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
    ("grpc.keepalive_time_ms", SILENCE_MS),
    ("grpc.keepalive_timeout_ms", SILENCE_ANSWER_MS),
)


class PublicServer:
    """Serves tidemill.v1.Generation, health and reflection."""

    def __init__(self, context: EdgeContext, *, tls: Tls | None = None) -> None:
        """Raises OSError when the files of `tls` cannot be read."""
        self._context = context
        self._gate = FrameGate(min(context.limits.connections_max, CONNECTIONS_MAX), tls)
        self._health = Health(context.models, [generation.SERVICE])
        self._server = grpc.aio.server(
            options=[
                *_OPTIONS,
                ("grpc.server.max_pending_requests", context.limits.requests_max),
            ],
            interceptors=[CallShares(context.limits.requests_max, context.keys)],
            # those that are being refused count here
            maximum_concurrent_rpcs=2 * context.limits.requests_max,
        )
        service = Generation(context)
        self._server.add_generic_rpc_handlers((service.methods(), self._health.methods()))
        names = (generation.SERVICE, health.SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, listener: socket.socket | None = None) -> str:
        """Accept from `listener`, or else listen (port 0: any free one). Return the address, host:port.
        Raises OSError."""
        self._gate.bind(self._server)
        await self._server.start()
        try:
            return self._gate.listen(host, port, listener)
        except OSError:
            await self._server.stop(None)
            await self._gate.close()
            raise

    async def run(self) -> None:
        """Serve until cancelled; then accept nothing more and let running calls finish."""
        try:
            await self._server.wait_for_termination()
        finally:
            self._health.end()
            await self._gate.close()
            await self._server.stop(self._context.shutdown_s_max())
