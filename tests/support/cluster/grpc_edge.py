"""A public gRPC server over a scripted Service, and calls to it as a client makes them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tests.support.cluster.fake_service import FakeService, saying, sources, tokenizer
from tidemill.cluster.edge.grpc_api.generation import SERVICE
from tidemill.cluster.edge.grpc_api.server import PublicServer
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.context import EdgeContext, open_context
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.requests.security import Tls
from tidemill.cluster.rpc.proto import generation_pb2 as pb

WINDOW_BYTES = 64 << 10
HELLO = pb.GenerateRequest(text="Hello")


@dataclass(frozen=True, slots=True)
class Client:
    """A connection to the server at `address`."""

    address: str
    context: EdgeContext
    channel: Any  # much of it is generic in the type stubs alone

    async def generate(self, request: pb.GenerateRequest, *metadata: tuple[str, str]) -> pb.GenerateResponse:
        data = await self.call("Generate")(request.SerializeToString(), metadata=metadata)
        return pb.GenerateResponse.FromString(data)

    def stream(self, request: pb.GenerateRequest, *metadata: tuple[str, str]) -> Any:  # noqa: ANN401 - a call
        return self.channel.unary_stream(
            f"/{SERVICE}/GenerateStream", response_deserializer=pb.GenerateChunk.FromString
        )(request.SerializeToString(), metadata=metadata)

    def call(self, name: str) -> Any:  # noqa: ANN401 - of bytes to bytes
        return self.channel.unary_unary(f"/{SERVICE}/{name}")

    async def refusal(
        self,
        request: pb.GenerateRequest | bytes,
        code: grpc.StatusCode,
        *metadata: tuple[str, str],
        compression: grpc.Compression | None = None,
    ) -> grpc.aio.AioRpcError:
        """Return the error with which Generate refuses a message, which has this code."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call("Generate")(data, metadata=metadata, compression=compression)
        assert caught.value.code() is code
        return caught.value


@asynccontextmanager
async def serving(
    service: FakeService | None = None,
    *,
    keys: Sequence[ApiKey] = (),
    limits: EdgeLimits | None = None,
    tls: Tls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncGenerator[Client]:
    """The server of a service that answers "a", or of another one, and a client that brings `credentials`."""
    service = service or FakeService(saying("a"))
    limits = replace(limits or EdgeLimits(), shutdown_s_max=0.0)
    context = open_context([ServedBackend(service, tokenizer())], sources(), keys=keys, limits=limits)
    server = PublicServer(context, tls=tls)
    address = await server.start("127.0.0.1", 0)
    running = asyncio.create_task(server.run())
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.http2.bdp_probe", 0),  # a client that takes no more than WINDOW_BYTES ahead
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]
    opened = (
        grpc.aio.insecure_channel(address, options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    )
    try:
        async with opened as channel:
            yield Client(address, context, channel)
    finally:
        running.cancel()
        await asyncio.wait([running])


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {str(name): cast("str", value) for name, value in error.trailing_metadata()}
