"""The public gRPC server with clients that are unknown, silent or slow, or that disconnect."""

import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tests.support.cluster.fake_service import FakeService, saying, worker_status
from tests.support.cluster.grpc_edge import HELLO, Client, serving, trailing
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.waits import until
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.edge.grpc_api import generation, health
from tidemill.cluster.edge.grpc_api.server import PublicServer
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.json_body import VALUES_MAX
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX, EdgeLimits
from tidemill.cluster.edge.requests.security import Tls
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, PortTaken, listening
from tidemill.cluster.rpc.proto import generation_pb2 as pb

pytestmark = IN_GRPC_LOOP

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
KEYS = (
    ApiKey(tenant="search", sha256=digest_of("sk-one")),
    ApiKey(tenant="shop", sha256=digest_of("sk-shop"), requests_per_minute=2),
)


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


async def test_client_without_a_known_key_is_refused_before_its_message_is_read() -> None:
    service = FakeService(saying("a"))
    async with serving(service, keys=KEYS) as client:
        for metadata in ((), (bearer(""),), (bearer("sk-on"),), (bearer(digest_of("sk-one")),)):
            error = await client.refusal(HELLO, UNAUTHENTICATED, *metadata)
            assert trailing(error)["tidemill-code"] == "invalid_api_key"
        silent = client.channel.stream_unary(f"/{generation.SERVICE}/Generate")()
        assert await silent.code() is UNAUTHENTICATED
        assert (await client.generate(HELLO, bearer("sk-one"))).choices[0].text == "a"
    (request,) = service.requests
    assert (request.tenant, request.salt) == ("tenant:search", "tenant:search/")


async def test_rate_limit_names_the_time_to_retry() -> None:
    async with serving(keys=KEYS) as client:
        for _ in range(2):
            await client.generate(HELLO, bearer("sk-shop"))
        error = await client.refusal(HELLO, EXHAUSTED, bearer("sk-shop"))
        assert int(trailing(error)["retry-after"]) > 0


@pytest.mark.parametrize("stall_at", [0, 2])
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancelling_a_call_frees_its_request(method: str, stall_at: int) -> None:
    service = FakeService(saying(" Emma is in the tower"), stall_at=stall_at)
    async with serving(service) as client:
        how = client.channel.unary_unary if method == "Generate" else client.channel.unary_stream
        call = how(f"/{generation.SERVICE}/{method}")(HELLO.SerializeToString())
        await service.stalled.wait()
        assert service.open_streams == 1
        assert client.context.open_answers.held == 1
        call.cancel()
        await service.idle.wait()
        await until(lambda: client.context.open_answers.held == 0)
    assert service.open_streams == 0


async def test_client_that_does_not_read_holds_its_answer_back() -> None:
    tokens = 4000
    service = FakeService(lambda _: [70] * tokens)
    service.model = replace(service.model, max_model_len=tokens + 100)
    long = pb.GenerateRequest(text="Hello", logprobs=20, sampling=pb.Sampling(max_tokens=tokens))
    short = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(max_tokens=64))
    async with serving(service) as client:
        stream = client.stream(long)
        await stream.read()
        grown = -1
        while grown != 0:  # until the long answer stands still
            before = service.pieces
            await client.generate(short)
            grown = service.pieces - before - 64
        assert service.pieces < tokens
        for _ in range(tokens - 1):
            assert isinstance(await stream.read(), pb.GenerateChunk)
        assert await stream.code() is grpc.StatusCode.OK


async def test_client_that_never_reads_is_cut_off() -> None:
    service = FakeService(lambda _: [70] * 400, per_piece=1)
    request = pb.GenerateRequest(text="Hello", logprobs=20, sampling=pb.Sampling(n=16, max_tokens=400))
    async with serving(service, limits=EdgeLimits(send_s_max=0.1)) as client:
        stream = client.stream(request)
        await stream.read()
        await service.idle.wait()
        await until(lambda: client.context.open_answers.held == 0)
        assert service.pieces < 16 * 400
        stream.cancel()


async def test_client_that_sends_no_message_is_cut_off() -> None:
    limits = EdgeLimits(body_s_max=0.1)
    async with serving(limits=limits) as client:
        silent = client.channel.stream_unary(f"/{generation.SERVICE}/Generate")()
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        empty = client.channel.stream_unary(f"/{generation.SERVICE}/Generate")()
        await empty.done_writing()
        assert await empty.code() is INVALID


async def test_too_large_messages_are_refused_also_when_compressed() -> None:
    large = pb.GenerateRequest(text="a" * BODY_BYTES_MAX)
    service = FakeService(saying("a"))
    async with serving(service) as client:
        await client.refusal(large, EXHAUSTED)
        await client.refusal(large, EXHAUSTED, compression=grpc.Compression.Gzip)
        await client.refusal(HELLO, EXHAUSTED, ("x-request-id", "a" * (17 << 10)))
        assert (await client.generate(HELLO)).choices
    assert len(service.requests) == 1


async def test_answers_and_bytes_beyond_the_limits_are_refused() -> None:
    service = FakeService(saying(" Emma is"), stall_at=1)
    limits = EdgeLimits(requests_max=8, answers_max=4, body_bytes_max=64)
    async with serving(service, limits=limits) as client:
        await client.refusal(pb.GenerateRequest(text="a" * 64), EXHAUSTED)
        streams = [client.stream(HELLO) for _ in range(2)]
        for stream in streams:
            await stream.read()
        error = await client.refusal(HELLO, EXHAUSTED)
        assert "answers" in (error.details() or "")
        assert trailing(error)["retry-after"] == "1"
        for stream in streams:
            stream.cancel()
        await service.idle.wait()


def wide(**fields: object) -> bytes:
    """A request with these fields of its sampling."""
    return pb.GenerateRequest(text="a", sampling=pb.Sampling(**fields)).SerializeToString()  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wide(logit_bias=dict.fromkeys(range(9000), 1.0)), "more than 8,192 fields"),
        (wide(stop=["a"] * 9000), "more than 8,192 fields"),
        (HELLO.SerializeToString() + b"\xf8\x07\x01" * 9000, "more than 8,192 fields"),
        (HELLO.SerializeToString() + b"\xfb\x07" * 9000, "more than 8,192 fields"),
        (wide(stop_token_ids=[1] * (VALUES_MAX + 1)), "262,145 values"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (VALUES_MAX + 1))).SerializeToString(), "values"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "no tidemill.v1.GenerateRequest"),
        (b"\xff" * 400, "no tidemill.v1.GenerateRequest"),
        (b"\x22\x7fa", "no tidemill.v1.GenerateRequest"),
    ],
)
async def test_messages_of_many_fields_are_refused_before_they_are_parsed(data: bytes, reason: str) -> None:
    async with serving() as client:
        error = await client.refusal(data, INVALID)
        assert reason in (error.details() or "")
        unpacked = pb.GenerateRequest(
            text="a",
            sampling=pb.Sampling(logit_bias=dict.fromkeys(range(800), 0.0), stop=["zz"] * 4),
        )
        assert (await client.generate(unpacked)).choices


async def test_client_that_floods_calls_leaves_some_to_others() -> None:
    """Silent calls of every service count: answers, health watches and reflection."""
    limits = EdgeLimits(requests_max=8)
    paths = (f"/{generation.SERVICE}/Generate", f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")
    async with serving(limits=limits) as client:
        watch = client.channel.unary_stream(f"/{health.SERVICE}/Watch")
        held = [client.channel.stream_stream(paths[index % 2])() for index in range(8)]
        held += [watch(b"") for _ in range(4)]
        reasons: list[str] = []
        while not reasons:  # the calls above begin meanwhile
            with suppress(grpc.aio.AioRpcError):
                await client.generate(HELLO)
                continue
            error = await client.refusal(HELLO, EXHAUSTED)
            reasons.append(error.details() or "")
        assert "half of what others leave" in reasons[0]
        for call in held:
            call.cancel()
        answered = False
        while not answered:
            with suppress(grpc.aio.AioRpcError):
                answered = bool((await client.generate(HELLO)).choices)


async def test_garbage_and_idle_connections_disturb_no_request() -> None:
    rng = Random(7)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings_frame = bytes(9)[:3] + b"\x04" + bytes(5)

    def garbage(index: int) -> bytes:
        noise = rng.randbytes(rng.randrange(1, 400))
        frame = len(noise).to_bytes(3, "big") + bytes([rng.randrange(256), rng.randrange(256)])
        frame += rng.randrange(1 << 31).to_bytes(4, "big") + noise
        return (noise, preface + noise, preface + settings_frame + frame)[index % 3]

    async with serving() as client:
        host, _, port = client.address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(300)]
        for index in range(300):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(garbage(index))
            if index % 50 == 0:
                assert (await client.generate(HELLO)).choices
        assert (await client.generate(HELLO)).choices
        for connection in idle:
            connection.close()


async def health_of(client: Client, service: str = "") -> int:
    check: Any = client.channel.unary_unary(
        f"/{health.SERVICE}/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return (await check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_follows_the_workers_that_generate() -> None:
    service = FakeService(saying("a"))
    ready = service.workers
    status = health_pb2.HealthCheckResponse
    async with serving(service, keys=KEYS) as client:
        for workers, expected in (
            (ready, status.SERVING),
            ((), status.NOT_SERVING),
            ((worker_status("prefill-0", "prefill"),), status.NOT_SERVING),
            ((worker_status("decode-0", state="draining"),), status.NOT_SERVING),
            ((worker_status("mixed-0", "mixed"),), status.SERVING),
        ):
            service.workers = workers
            for name in ("", generation.SERVICE):
                assert await health_of(client, name) == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(client, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_is_sent_to_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_S", 0.01)
    service = FakeService(saying("a"))
    ready = service.workers
    status = health_pb2.HealthCheckResponse
    async with serving(service) as client:
        watch: Any = client.channel.unary_stream(
            f"/{health.SERVICE}/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=status.FromString,
        )
        watching = watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == status.SERVING
        service.workers = ()
        assert (await watching.read()).status == status.NOT_SERVING
        service.workers = ready
        assert (await watching.read()).status == status.SERVING
        unknown = watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await unknown.read()).status == status.SERVICE_UNKNOWN
        watching.cancel()
        unknown.cancel()


async def test_reflection_lists_the_services_and_their_messages() -> None:
    ask = reflection_pb2.ServerReflectionRequest
    async with serving() as client:
        call: Any = client.channel.stream_stream(
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
            request_serializer=ask.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [ask(list_services=""), ask(file_containing_symbol=generation.SERVICE)]
        listed, file = [answer async for answer in call(iter(asked))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {generation.SERVICE, health.SERVICE, reflection.SERVICE_NAME}
        pool = DescriptorPool()
        for data in file.file_descriptor_response.file_descriptor_proto:
            pool.Add(FileDescriptorProto.FromString(data))
        methods = pool.FindServiceByName(generation.SERVICE).methods_by_name
        assert set(methods) == {"Generate", "GenerateStream", "Tokenize", "ListModels"}


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_and_mutual_tls(tmp_path: Path, *, mutual: bool) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    issued = issue(tmp_path / "tls", authority, "127.0.0.1")
    tls = Tls(certificate=issued.certificate, key=issued.key, client_ca=issued.ca if mutual else None)

    def credentials(of: trustme.CA | None) -> grpc.ChannelCredentials:
        own = of and of.issue_cert("client")
        pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()) if own else ()
        return grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *pair)

    for given, is_served in (
        (credentials(authority), True),
        (credentials(None), not mutual),
        (credentials(stranger), not mutual),
        (None, False),
    ):
        async with serving(tls=tls, credentials=given) as client:
            if is_served:
                assert (await client.generate(HELLO)).choices
            else:
                await client.refusal(HELLO, grpc.StatusCode.UNAVAILABLE)


async def test_taken_port_is_a_clear_error() -> None:
    async with serving() as client:
        port = int(client.address.rpartition(":")[2])
        with pytest.raises(OSError, match=str(port)):
            await PublicServer(client.context).start("127.0.0.1", port)


def test_taken_port_of_grpc_is_reported_before_the_cluster_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint(host="127.0.0.1", port=0, grpc_port=taken.getsockname()[1])
        with pytest.raises(PortTaken, match="--grpc-port"), listening(endpoint):
            pass
