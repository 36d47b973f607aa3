"""The HTTP application: its paths. It knows a cluster only through the Services of its models.

body --API--> Reply --answer--> messages --EventStream or one body--> client
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from tidemill import __version__
from tidemill.cluster.edge.apis.generate import generate
from tidemill.cluster.edge.apis.messages import count_tokens, messages
from tidemill.cluster.edge.apis.openai import chat, completions
from tidemill.cluster.edge.apis.pooling import embeddings, rerank, score
from tidemill.cluster.edge.apis.prefixes import release_prefix, retain_prefix
from tidemill.cluster.edge.apis.reply import Outgoing, Reply, answer
from tidemill.cluster.edge.apis.responses import responses
from tidemill.cluster.edge.apis.tokenize import detokenize, tokenize, tokenizer_info
from tidemill.cluster.edge.chat.request.hints import SALT_FORM
from tidemill.cluster.edge.http.batches import add_batch_routes
from tidemill.cluster.edge.http.dashboard import add_page_routes
from tidemill.cluster.edge.http.errors import JsonReply, add_error_replies
from tidemill.cluster.edge.http.memory import BudgetBody, memory_of
from tidemill.cluster.edge.http.middleware import IGNORED_HEADER, EdgeMiddleware, JsonRoute
from tidemill.cluster.edge.http.openapi import describe
from tidemill.cluster.edge.http.records import add_record_routes
from tidemill.cluster.edge.http.stream import CLIENT_CLOSED_REQUEST, EventStream, while_connected
from tidemill.cluster.edge.http.support import add_support_routes
from tidemill.cluster.edge.http.workers import add_member_routes, add_worker_routes
from tidemill.cluster.edge.requests.caller import REQUEST_ID_HEADER, Caller, caller_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.models import EdgeModel, EdgeModels
from tidemill.cluster.edge.requests.recent_requests import add_recent_routes
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.metrics.exposition import CONTENT_TYPE, exposition
from tidemill.cluster.orders import SetBudget
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError, Unserved


def app_of(context: EdgeContext) -> FastAPI:
    """Return the OpenAI API over the models of a context, with /tokenize, /health, /metrics, /cluster,
    /version and /docs."""
    edge = Edge(context)
    app = FastAPI(
        title="Tidemill",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=JsonReply,
    )
    app.router.route_class = JsonRoute
    app.add_middleware(
        EdgeMiddleware,
        new_id=context.sources.new_id,
        count=context.metrics.count_error,
        limits=context.limits,
        keys=context.keys,
        stop_reason=context.stop_reason,
    )
    limits = context.limits
    if limits.allowed_origins:
        app.add_middleware(  # outside of the other: a preflight brings no key
            CORSMiddleware,
            allow_origins=limits.allowed_origins,
            allow_methods=limits.allowed_methods,
            allow_headers=limits.allowed_headers,
            allow_credentials=limits.allow_credentials,
            expose_headers=(REQUEST_ID_HEADER, IGNORED_HEADER),
        )
    add_error_replies(app, context.metrics.count_error)
    for path, prepare in APIS.items():
        add_answer_route(app, context, path, prepare)
    for path, same in OTHER_PATHS.items():
        add_answer_route(app, context, path, APIS[same], in_schema=False)
    for path, work in TEXTS.items():
        add_text_route(app, context.models, path, work)
    app.add_api_route("/v1/responses", no_socket, include_in_schema=False)
    add_record_routes(app, context)
    add_batch_routes(app, context, APIS)
    app.add_api_route("/v1/prefixes/{name}", edge.release_prefix, methods=["DELETE"])
    app.add_api_route("/v1/models", edge.models)
    for path in ("/v1/models/", "/models", "/models/"):  # as some clients write it
        app.add_api_route(path, edge.models, include_in_schema=False)
    app.add_api_route("/v1/models/{name:path}", edge.model)
    app.add_api_route("/models/{name:path}", edge.model, include_in_schema=False)
    for path in ("/reset_prefix_cache", "/flush_cache"):
        app.add_api_route(path, edge.reset_prefix_cache, methods=["POST"])
    for path in ("/health", "/health/ready"):
        app.add_api_route(path, edge.health)
    for path in ("/health/live", "/ping", "/api/hello"):
        app.add_api_route(path, edge.alive)
    app.add_api_route("/load", edge.load)
    app.add_api_route("/cluster", edge.cluster)
    app.add_api_route("/cluster/history", edge.history)
    app.add_api_route("/cluster/memory", edge.memory)
    app.add_api_route("/cluster/memory", edge.set_budget, methods=["POST"])
    add_worker_routes(app, context.models)
    add_member_routes(app, context.models)
    add_recent_routes(app, context.recent.rows if context.group is None else context.group.rows)
    add_support_routes(app, context)
    add_page_routes(app)
    app.add_api_route("/version", edge.version)
    app.add_api_route("/metrics", edge.metrics)
    app.add_api_route("/tokenizer_info", edge.tokenizer_info)
    describe(app)
    return app


PrefixName = Annotated[str, InPath(max_length=64)]
Salt = Annotated[str | None, Query(pattern=SALT_FORM)]


Prepare = Callable[[EdgeContext, EdgeModel, Any, Caller], Awaitable[Reply]]
"""An API: makes a reply of a body, whose type FastAPI reads from the function."""

APIS: dict[str, Prepare] = {
    "/inference/v1/generate": generate,
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/messages": messages,
    "/v1/prefixes": retain_prefix,
    "/v1/rerank": rerank,
    "/v1/responses": responses,
    "/v1/score": score,
}
OTHER_PATHS = {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank", "/score": "/v1/score"}
"""The paths of vLLM for the same work."""

TEXTS: dict[str, Callable[[EdgeModel, Any], Awaitable[bytes]]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/messages/count_tokens": count_tokens,
}


def add_answer_route(
    app: FastAPI, edge: EdgeContext, path: str, prepare: Prepare, *, in_schema: bool = True
) -> None:
    """Add POST `path`, whose replies stream or are whole."""

    async def route(body: Any, request: Request) -> Response:  # noqa: ANN401  see `_post`
        model = edge.models.find(body.model)
        reply = await prepare(edge, model, body, caller_of(request.headers, edge.keys))
        request.state.ignored = reply.job.ignored
        asked = {name: getattr(request.state, name) for name in ("request_id", "client", "key")}

        async def respond(out: Outgoing) -> None:
            await answer(edge, reply, out, **asked)

        if reply.streams:
            return EventStream(respond)
        whole: list[bytes] = []

        async def keep(message: bytes) -> None:
            whole.append(message)

        async def work() -> Response:
            await respond(Outgoing(keep))
            return Response(whole[0], media_type="application/json")

        found = await while_connected(request.receive, work())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if found is None else found

    _post(app, path, prepare, route, in_schema=in_schema)


def add_text_route(
    app: FastAPI, models: EdgeModels, path: str, work: Callable[[EdgeModel, Any], Awaitable[bytes]]
) -> None:
    """Add POST `path`, which returns JSON."""

    async def route(body: Any) -> Response:  # noqa: ANN401  see `_post`
        return Response(await work(models.find(body.model), body), media_type="application/json")

    _post(app, path, work, route)


def _post(
    app: FastAPI,
    path: str,
    work: Callable[..., object],
    route: Callable[..., Awaitable[Response]],
    *,
    in_schema: bool = True,
) -> None:
    """Add a route with the name, the text and the type of the body of `work`."""
    route.__name__, route.__doc__ = work.__name__, work.__doc__
    route.__annotations__["body"] = work.__annotations__["body"]
    app.add_api_route(path, route, methods=["POST"], include_in_schema=in_schema)


async def no_socket(request: Request) -> None:
    """Refuse a WebSocket in words that make clients fall back to requests. Raises RequestError and, for other
    requests, HTTPException."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise HTTPException(405)
    raise RequestError("responses have no WebSocket here: send POST requests, which may stream", status=426)


class Edge:
    """The endpoints."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._models = context.models

    async def release_prefix(self, name: PrefixName, request: Request, cache_salt: Salt = None) -> Json:
        """Retain a prefix no longer. `cache_salt` is that of its request."""
        caller = caller_of(request.headers, self._context.keys)
        return await release_prefix(self._context, name, cache_salt, caller)

    async def models(self) -> Json:
        """List the models."""
        listed = self._models.listed()
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        return {"object": "list", "data": listed, "has_more": False, **ends}

    async def model(self, name: str) -> Json:
        """Describe one model."""
        return self._models.find(name).json(name)

    async def tokenizer_info(self, model: str | None = None) -> Json:
        """Return the tokenizer_config.json of a model, with its chat template."""
        return await tokenizer_info(self._models.find(model))

    async def health(self) -> Json:
        """Return 200 when some worker can answer."""
        if not await self._models.can_answer():
            raise Unserved("no decode worker is ready")
        return {"status": "ok"}

    async def alive(self) -> Json:
        """Return 200 as long as the edge answers at all."""
        return {"status": "ok"}

    async def load(self) -> Json:
        """Return the number of answers in progress at this port."""
        group = self._context.group
        return {
            "server_load": self._context.open_answers.held if group is None else await group.open_answers()
        }

    async def cluster(self) -> Json:
        """Return every worker: its facts, its load, its memory."""
        fleets = await self._models.fleets()
        return {
            "models": [model.json() for model in self._models],
            "frontend": {"pid": os.getpid(), "version": __version__},
            "workers": [
                {"model": name, **asdict(worker)}
                for name, status in fleets.items()
                for worker in status.workers
            ],
        }

    async def history(self) -> Json:
        """Return the last fifteen minutes of each model, and of all of them under the empty name: tokens per
        second, hit ratio, percentiles of latencies, memory by class, starts and ends of workers."""
        return self._context.history.json()

    async def memory(self) -> Json:
        """Return the memory of every worker: its budget, who set it, and its use."""
        return memory_of(await self._models.fleets())

    async def set_budget(self, body: BudgetBody) -> Json:
        """Give a worker another memory budget, or return it to the broker. It takes effect within seconds;
        the reply is the memory of every worker now."""
        await self._models.order(SetBudget(body.worker, body.budget))
        return memory_of(await self._models.fleets())

    async def reset_prefix_cache(self) -> Json:
        """Make new requests find no cached prefix of any model, for measurements."""
        await asyncio.gather(*(model.service.reset_prefix_cache() for model in self._models))
        return {"status": "ok"}

    async def version(self) -> Json:
        """Return the version of the server."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Return metrics in the text format of Prometheus."""
        try:
            fleets = await self._models.fleets()
        except TidemillError:
            fleets = {}  # the edge's own metrics matter most when no router answers
        group = self._context.group
        summed = None if group is None else await group.samples()
        return Response(exposition(self._context.metrics, fleets, summed), media_type=CONTENT_TYPE)
