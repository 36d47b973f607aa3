"""The service tidemill.v1.Generation: its methods.

message --body_of--> body --intake--> Reply --answer--> messages
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tidemill.cluster.edge.apis.reply import Outgoing, Reply, Writer, answer
from tidemill.cluster.edge.grpc_api.call_shares import headers_of
from tidemill.cluster.edge.grpc_api.errors import refusal_of
from tidemill.cluster.edge.grpc_api.frames import client_at
from tidemill.cluster.edge.grpc_api.messages import body_of, grow, parse, tokenize_body_of, usage_of
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.caller import REQUEST_ID_HEADER, caller_of, request_id_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import UsageCounter
from tidemill.cluster.listener import InFlightLimit, client_of
from tidemill.cluster.rpc.proto import generation_pb2 as pb
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

if TYPE_CHECKING:  # generic in the type stubs only
    Context = grpc.aio.ServicerContext[bytes, bytes]

SERVICE = "tidemill.v1.Generation"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _RpcCall:
    """One call: its message, its caller, and the destination of the answer."""

    id: str
    client: str
    key: ApiKey | None
    data: bytes
    headers: Mapping[str, str]
    send: Callable[[bytes], Awaitable[None]]


class WholeMessage(Writer):
    """Writes the answer of Generate."""

    def __init__(self, reply_id: str, model: EdgeModel, job: PreparedRequest) -> None:
        super().__init__(UsageCounter(job))
        self._model = model
        self._whole = pb.GenerateResponse(
            id=reply_id, model=model.name, choices=[pb.Choice() for _ in job.requests]
        )

    def grow(self, increment: Increment) -> Iterable[bytes]:
        grow(self._whole.choices[increment.choice], increment, self._model.tokenizer.piece)
        return ()

    async def close(self) -> Iterable[bytes]:
        self._whole.usage.CopyFrom(usage_of(self.tally))
        return (self._whole.SerializeToString(),)


class ChunkMessages(Writer):
    """Writes the answer of GenerateStream. The usage is part of the last chunk."""

    def __init__(self, reply_id: str, model: EdgeModel, job: PreparedRequest) -> None:
        super().__init__(UsageCounter(job))
        self._id = reply_id
        self._model = model
        self._unfinished = len(job.requests)

    def grow(self, increment: Increment) -> Iterable[bytes]:
        self._unfinished -= increment.growth.finish is not None
        chunk = pb.GenerateChunk(id=self._id, model=self._model.name)
        grow(chunk.choice, increment, self._model.tokenizer.piece)
        if not self._unfinished:
            chunk.usage.CopyFrom(usage_of(self.tally))
        return (chunk.SerializeToString(),)

    async def close(self) -> Iterable[bytes]:
        return ()


class _Gone(TidemillError):
    """The client disconnected during its answer."""


class Generation:
    """The methods. They read messages themselves, after the key check, so that unauthorized clients send
    none."""

    def __init__(self, edge: EdgeContext) -> None:
        self._edge = edge
        self._num_bytes = InFlightLimit(edge.limits.body_bytes_max, "bytes of messages")

    def methods(self) -> grpc.GenericRpcHandler:
        methods = {
            "Generate": partial(self._answer, kind=WholeMessage),
            "GenerateStream": partial(self._answer, kind=ChunkMessages),
            "Tokenize": self._tokenize,
            "ListModels": self._list_models,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: self._method(name, work) for name, work in methods.items()}
        )

    def _method(
        self, name: str, work: Callable[[_RpcCall], Awaitable[None]]
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        path = f"/{SERVICE}/{name}"

        async def serve(frames: AsyncIterator[bytes], context: "Context") -> None:
            headers = headers_of(context)
            request_id = request_id_of(headers.get(REQUEST_ID_HEADER)) or self._edge.sources.new_id()
            try:
                await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
                key = await self._edge.keys.admit(path, headers)
                data = await self._read(frames)
                client = client_of(self._edge.keys.tenant(headers), client_at(context.peer()))
                with self._num_bytes.holding(len(data), client):
                    send = partial(self._write, context)
                    await work(_RpcCall(request_id, client, key, data, headers, send))
            except _Gone:
                return
            except Exception as error:
                if not isinstance(error, TidemillError):
                    log.error("a call broke", exc_info=error)  # noqa: TRY400 - clients' errors are not logged
                status, code, message, metadata = refusal_of(error)
                self._edge.metrics.count_error(status)
                await context.abort(code, message, metadata)
                raise

        # for clients it is as in the proto: the sender decides the number of messages
        return grpc.stream_stream_rpc_method_handler(serve)

    async def _answer(self, call: _RpcCall, kind: type[WholeMessage | ChunkMessages]) -> None:
        body = body_of(call.data)
        model = self._edge.models.find(body.model)
        job = await model.intake.completion(body, caller_of(call.headers, self._edge.keys))
        reply_id = f"gen-{self._edge.sources.new_id()}"
        writer = kind(reply_id, model, job)
        reply = Reply(model=model, job=job, kind="grpc", id=reply_id, writer=writer)
        out = Outgoing(call.send)
        await answer(self._edge, reply, out, request_id=call.id, client=call.client, key=call.key)

    async def _tokenize(self, call: _RpcCall) -> None:
        body = tokenize_body_of(call.data)
        model = self._edge.models.find(body.model)
        tokens = await model.intake.prompt_of(body)
        answer = pb.TokenizeResponse(token_ids=tokens, max_model_len=model.served.max_model_len)
        await call.send(answer.SerializeToString())

    async def _list_models(self, call: _RpcCall) -> None:
        parse(pb.ListModelsRequest(), call.data)
        models = [
            pb.Model(
                name=name,
                root=model.name,
                max_model_len=model.served.max_model_len,
                vocab_size=model.served.vocab_size,
                created=model.served.created_s,
            )
            for model in self._edge.models
            for name in model.served.names
        ]
        await call.send(pb.ListModelsResponse(models=models).SerializeToString())

    async def _read(self, frames: AsyncIterator[bytes]) -> bytes:
        """Return the message of a call. Raises RequestError."""
        try:
            async with asyncio.timeout(self._edge.limits.body_s_max):
                data = await anext(frames, None)
        except TimeoutError:
            raise RequestError("the message took too long: it was not read to its end", status=408) from None
        if data is None:
            raise RequestError("the call ended without a message")
        return data

    async def _write(self, context: "Context", message: bytes) -> None:
        """Write, and wait while the client does not read. Raises RequestError, _Gone."""
        try:
            async with asyncio.timeout(self._edge.limits.send_s_max):
                await context.write(message)
        except grpc.aio.InternalError:
            raise _Gone from None
        except TimeoutError:
            raise RequestError("the answer was read too slowly: it was cut off", status=408) from None
