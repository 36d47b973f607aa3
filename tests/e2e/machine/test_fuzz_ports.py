"""Messages that no edge sends, to the ports of a live worker and router: both refuse them and go on."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast, get_args

import grpc
import httpx
import msgspec
import psutil

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tests.support.cluster.ranges import with_ends
from tests.support.e2e.server import Server, command_of
from tests.support.e2e.streams import completion
from tidemill.cluster.orders import RouterOrder, SupervisorOrder
from tidemill.cluster.rpc.codec import (
    Cancel,
    Generate,
    Hello,
    Prefetch,
    Produce,
    encode,
    encode_client_frame,
    encode_heartbeat,
)
from tidemill.cluster.rpc.placement_codec import encode_placement_request
from tidemill.workers.messages import Grammar, Request, Sampling, WorkerId

ANSWER_S_MAX = 2.0

SAMPLING = Sampling(
    temperature=0.5,
    bad_words=((5, 6), (7,)),
    logit_bias=((5, 1.0),),
    logprobs=2,
    prompt_logprobs=1,
    grammar=Grammar(kind="regex", text="a+"),
)
REQUEST = Request(
    request_id="fuzz",
    tokens=(5, 6, 7),
    max_new_tokens=2,
    sampling=SAMPLING,
    stop_token_ids=(1,),
    breakpoints=(2,),
)


def altered(*messages: bytes) -> list[bytes]:
    """Return each message with each of its integers at each end."""
    plain = map(msgspec.msgpack.decode, messages)
    return [encode(changed) for message in plain for changed in with_ends(message)]


def sent(channel: grpc.Channel, method: str, frames: Iterable[bytes]) -> None:
    """Send a stream, and read its first answer if there is one."""
    call = cast("Any", channel.stream_stream(method))(iter(frames), timeout=ANSWER_S_MAX)
    with suppress(grpc.RpcError, StopIteration):
        next(call)
    call.cancel()


def ports_of(server: Server) -> Iterator[str]:
    """Yield the addresses of the routers' processes."""
    for process in server.processes():
        if "RouterActor" in command_of(process):
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    yield f"127.0.0.1:{socket.laddr.port}"


def test_fuzz_of_ports_ends_neither_worker_nor_router(server: Server) -> None:
    before = {process.pid for process in server.processes()}
    calls = [Generate(1, REQUEST), Produce(1, REQUEST), Prefetch(1, REQUEST), Cancel(1, "a", "b")]
    frames = altered(*map(encode_client_frame, calls))
    assert len(frames) > 400
    for row in server.workers():
        info = row["info"]
        hello = encode_client_frame(Hello(WorkerId(info["worker"])))
        with grpc.insecure_channel(info["address"]) as channel:
            for frame in frames:
                sent(channel, "/tidemill.Worker/Stream", [hello, frame])
    beats, placed = (
        altered(encode_heartbeat(heartbeat("fuzz-0"))),
        altered(encode_placement_request(placement_request())),
    )
    orders = [kind.__name__ for kind in (*get_args(RouterOrder), *get_args(SupervisorOrder))]
    addresses = list(ports_of(server))
    assert addresses
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            for beat in beats:
                sent(channel, "/tidemill.Router/Report", [beat])
                sent(channel, "/tidemill.Router/Memory", [beat])
            for name in ("Place", "Lost", "Out", "Count", "Quota", "Missed"):
                for message in placed:
                    with suppress(grpc.RpcError):
                        channel.unary_unary(f"/tidemill.Router/{name}")(message, timeout=ANSWER_S_MAX)
            for name in orders:
                for message in (b"", b"\x80", b"\xc1", encode([2**63]), encode({"worker": -1})):
                    with suppress(grpc.RpcError):
                        channel.unary_unary(f"/tidemill.Orders/{name}")(message, timeout=ANSWER_S_MAX)
    assert before <= {process.pid for process in server.processes()}, "a process has ended"
    reply = httpx.post(f"{server.url}/v1/completions", json=completion("Hello", 2), timeout=60)
    assert reply.status_code == 200, reply.text
