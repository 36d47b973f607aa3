"""A real server with gRPC beside HTTP, and certificates between its processes: equal tokens, no strangers."""

import asyncio
import re
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2

from tests import grpc_loop
from tests.e2e.server import EVENTUALLY_S_MAX, Server, eventually, listening_of
from tests.unit.cluster.test_mutual_tls import issue
from tidemill.cluster.channels import open_channel
from tidemill.cluster.codec import Hello, encode_client_frame
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.proto import generation_pb2 as pb
from tidemill.workers.messages import WorkerId

STORY = "The keeper of the lighthouse said that " * 8


class Edge:
    """A server, the address of its gRPC, and what its processes show each other."""

    def __init__(self, server: Server, log_file: Path, grpc_address: str, tls: MutualTls) -> None:
        self.server = server
        self.log_file = log_file
        self.grpc_address = grpc_address
        self.tls = tls


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Generator[Edge]:
    folder = tmp_path_factory.mktemp("grpc")
    tls = issue(folder / "tls", trustme.CA())
    log_file = folder / "log"
    arguments = ["keeper", "--port", "0", "--grpc-port", "0", "--memory", "64MiB", "--log-level", "debug"]
    arguments += ["--cluster-ssl-certfile", str(tls.certificate), "--cluster-ssl-keyfile", str(tls.key)]
    arguments += ["--cluster-ssl-ca-certs", str(tls.ca)]
    server = Server(arguments, log_file)
    try:
        found = re.search(r"gRPC on (\S+)", log_file.read_text())
        assert found is not None
        yield Edge(server, log_file, found[1], tls)
        assert server.stop() == 0
    finally:
        server.kill_everything()


def over_http(edge: Edge, **body: object) -> dict[str, Any]:
    reply = httpx.post(f"{edge.server.url}/v1/completions", json=body, timeout=EVENTUALLY_S_MAX)
    assert reply.status_code == 200, reply.text
    return reply.json()


def calls_of(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    """Generate and GenerateStream."""
    service = "/tidemill.v1.Generation"
    anything: Any = channel
    return (
        anything.unary_unary(
            f"{service}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        ),
        anything.unary_stream(
            f"{service}/GenerateStream",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateChunk.FromString,
        ),
    )


def test_greedy_tokens_are_those_of_http(edge: Edge) -> None:
    prompts = ["Where is Emma?", STORY]
    sampling = pb.Sampling(temperature=0, max_tokens=24, ignore_eos=True)

    async def main() -> None:
        async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
            generate, stream = calls_of(channel)
            for prompt in prompts:
                expected = over_http(edge, prompt=prompt, temperature=0, max_tokens=24, ignore_eos=True)
                request = pb.GenerateRequest(text=prompt, sampling=sampling)
                whole = await generate(request)
                chunks = [chunk async for chunk in stream(request)]
                (choice,) = whole.choices
                assert choice.text == expected["choices"][0]["text"]
                assert "".join(chunk.choice.text for chunk in chunks) == choice.text
                ids = [token for chunk in chunks for token in chunk.choice.token_ids]
                assert ids == list(choice.token_ids)
                assert len(ids) == 24
                assert whole.usage.prompt_tokens == expected["usage"]["prompt_tokens"]

    grpc_loop.run(main())


def test_health_and_garbage(edge: Edge) -> None:
    host, _, port = edge.grpc_address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    for one in idle[:100]:
        one.sendall(b"\x00\xff" * 100)

    async def main() -> None:
        async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
            check: Any = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            status = await check(health_pb2.HealthCheckRequest(service="tidemill.v1.Generation"))
            assert status.status == health_pb2.HealthCheckResponse.SERVING

    grpc_loop.run(main())
    for one in idle:
        one.close()


def test_a_cancelled_stream_frees_its_memory(edge: Edge) -> None:
    sampling = pb.Sampling(temperature=0, max_tokens=400, ignore_eos=True)

    async def main() -> None:
        async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
            _, stream = calls_of(channel)
            call = stream(pb.GenerateRequest(text="Where is Emma?", sampling=sampling))
            assert isinstance(await call.read(), pb.GenerateChunk)
            call.cancel()

    grpc_loop.run(main())

    def nothing_lives() -> bool:
        loads = [row["load"] for row in edge.server.workers()]
        return all(
            load["running_rows"] == 0 and load["memory"]["pages_live"] + load["memory"]["states_live"] == 0
            for load in loads
        )

    eventually(nothing_lives)


@pytest.mark.parametrize("who", ["plain", "another authority"])
def test_a_stranger_cannot_reach_a_worker(edge: Edge, who: str, tmp_path: Path) -> None:
    theirs = None if who == "plain" else issue(tmp_path / "theirs", trustme.CA())
    row = edge.server.workers("decode")[0]["info"]
    hello = encode_client_frame(Hello(WorkerId(row["worker"])))

    async def answer(tls: MutualTls | None) -> Any:  # noqa: ANN401 - a frame, or the end of the stream
        async with open_channel(row["address"], tls) as channel, asyncio.timeout(EVENTUALLY_S_MAX):
            anything: Any = channel
            call = anything.stream_stream("/tidemill.Worker/Stream")()
            await call.write(hello)
            await call.done_writing()
            return await call.read()

    async def main() -> None:
        assert not isinstance(await answer(edge.tls), bytes), "the stream ends as it should"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(theirs)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    grpc_loop.run(main())


def test_every_process_listens_on_loopback_alone(edge: Edge) -> None:
    listening = listening_of(edge.server.processes())
    assert len(listening) >= 5, "HTTP, gRPC, a router and two workers at least"
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_what_people_ask_and_their_keys_are_in_no_log(edge: Edge) -> None:
    key, words = "sk-zyxomma-petiolatum", "Who is Ophiogomphus?"
    bearer = f"Bearer {key}"
    for body in ({"prompt": words, "max_tokens": 4}, {"prompt": words, "max_tokens": -1}):
        httpx.post(
            f"{edge.server.url}/v1/completions",
            json=body,
            headers={"authorization": bearer},
            timeout=EVENTUALLY_S_MAX,
        )

    async def main() -> None:
        async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
            generate, _ = calls_of(channel)
            request = pb.GenerateRequest(text=words, sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
            reply = await generate(request, metadata=(("authorization", bearer),))
            assert reply.usage.completion_tokens == 4

    grpc_loop.run(main())
    log = edge.log_file.read_text()
    assert "gRPC on" in log
    assert "Ophiogomphus" not in log
    assert "zyxomma" not in log
