"""A scripted Service for tests of the edge: it replays tokens, counts open streams, and can fail or stall."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI

from tests.support.cluster.heartbeats import worker_info
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.edge.http.app import app_of
from tidemill.cluster.edge.http.connection import with_limits
from tidemill.cluster.edge.requests.context import Sources, open_context
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.requests.security import Tls, tls_context
from tidemill.cluster.edge.service import ServedModel
from tidemill.cluster.messages import (
    FleetStatus,
    MembersAnswer,
    RoleScale,
    WorkerStatus,
)
from tidemill.cluster.orders import AnswerT, Drain, Order, Roles, Scale, SetBudget, SetRole
from tidemill.cluster.processes.endpoint.handshakes import EdgeServer
from tidemill.workers.cache_lookup import CacheMiss
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    NO_MEMORY,
    Produced,
    Provenance,
    Request,
    RequestError,
    Role,
    StreamPiece,
    TokenLogprob,
    Trace,
    Unserved,
    WorkerId,
    WorkerLoad,
)

Result = TypeVar("Result")

KEEPER = Path(__file__).parents[3] / "workers" / "models" / "keeper"
EOS = 1
PROMPT_PIECE = 3
"""Logprobs of a prompt that come together."""

MODEL = ServedModel(
    names=("keeper",),
    folder=KEEPER,
    max_model_len=512,
    vocab_size=896,
    eos_token_ids=(EOS,),
    created_s=1_700_000_000,
)
TRACE = Trace(
    attempts=1,
    decode=WorkerId("decode-0.a"),
    provenance=Provenance(reused_tokens=2, fetched_tokens=3, computed_tokens=1),
    prefill=WorkerId("prefill-0.b"),
    produced=Produced(depth=5, provenance=Provenance(reused_tokens=1, computed_tokens=4)),
    misses=(
        CacheMiss(reason="other_text", start=1, end=5, worker="prefill-0.b", seconds=0.5, other_text=(2, 2)),
        CacheMiss(reason="last_page", start=5, end=6, worker="decode-0.a", seconds=0.1),
    ),
)


COUNTERS: dict[str, float] = {
    "pages_published": 5,
    "spec_trials": 4,
    "spec_accepted_tokens": 3,
    "store_put_bytes": 2048,
    "store_is_down": 0,
    "evicted_pages_for_states": 2,
    "evicted_pages_for_resize": 3,
    "spec_accepted_tokens_at_0": 2,
    "spec_accepted_tokens_at_1": 1,
    "store_puts_as_stored": 6,
    "store_puts_as_existed": 1,
    "store_puts_as_full": 1,
    "store_puts_as_skipped": 3,
    "store_gets_as_corrupt": 4,
    "store_gets_as_truncated": 1,
}


def worker_status(name: str, role: Role = "decode", state: str = "ready") -> WorkerStatus:
    info = worker_info(
        f"{name}.x",
        role,
        address="127.0.0.1:1",
        pid=7,
        node="here",
        page_tokens=4,
        device="here/cpu",
        memory_bytes=8 << 20,
        memory_floor_bytes=1 << 20,
        memory_max_bytes=16 << 20,
    )
    memory = NO_MEMORY | {"pages_live": 1 << 20, "free": 3 << 20}
    load = WorkerLoad(running_rows=2, memory=memory, budget_bytes=4 << 20, state_slots=6, counters=COUNTERS)
    status = WorkerStatus(info=info, load=load, state=state, heard_ago_s=0.5, restorable_depths=3)
    return replace(status, set_by="broker", set_bytes=5 << 20)


@dataclass
class FakeService:
    """Answers each request with `script`, `per_piece` tokens at a time, to `max_new_tokens` or a stop token;
    with `pooled` one that pools.

    `fail_at` raises `failure` before the piece of that index, `stall_at` waits for ever there. Each of
    `moods` is raised once, and only the first `free` requests are answered, each after `delay_s`.
    """

    script: Callable[[Request], Sequence[int]]
    per_piece: int = 1
    fail_at: int | None = None
    failure: Exception = field(default_factory=lambda: Unserved("no worker is left"))
    stall_at: int | None = None
    moods: list[Exception] = field(default_factory=list[Exception])
    free: int | None = None
    delay_s: float = 0.0
    pooled: Callable[[Request], Sequence[float]] = lambda _: ()
    model: ServedModel = MODEL
    workers: tuple[WorkerStatus, ...] = (worker_status("prefill-0", "prefill"), worker_status("decode-0"))
    requests: list[Request] = field(default_factory=list[Request])
    budgets: list[tuple[str, int | None]] = field(default_factory=list[tuple[str, int | None]])
    orders: list[object] = field(default_factory=list[object])
    scaled: RoleScale = field(default_factory=lambda: RoleScale(role="decode", workers=1))
    open_streams: int = 0
    resets: int = 0
    pieces: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, request: Request, emit: Emit[StreamPiece]) -> None:
        if self.moods:
            raise self.moods.pop()
        if self.free is not None and len(self.requests) >= self.free:
            await self._stall()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.requests.append(request)
        self.open_streams += 1
        self.idle.clear()
        try:
            async for piece in self._pieces(request):
                pause = emit(piece)
                if pause is not None:
                    await pause()
        finally:
            self.open_streams -= 1
            if self.open_streams == 0:
                self.idle.set()

    async def _stall(self) -> None:
        self.stalled.set()
        await asyncio.Event().wait()

    async def _pieces(self, request: Request) -> AsyncGenerator[StreamPiece]:
        if request.pools:
            numbers = struct.pack(f"<{len(self.pooled(request))}f", *self.pooled(request))
            if self.fail_at == len(self.requests):
                raise self.failure
            yield StreamPiece(tokens=(), trace=TRACE, finish="stop", pooled=numbers)
            return
        tokens = list(self.script(request))[: request.max_new_tokens]
        ends = [index for index, token in enumerate(tokens) if token in request.stop_token_ids]
        finish = "stop" if ends else "length"
        tokens = tokens[: ends[0] + 1] if ends else tokens
        starts = range(0, len(tokens), self.per_piece)
        for place in range(0, request.to_score, PROMPT_PIECE):
            targets = request.tokens[place + 1 : place + 1 + PROMPT_PIECE]
            alternatives = request.sampling.prompt_logprobs or 0
            scores = tuple(scored(token, alternatives) for token in targets)
            yield StreamPiece(tokens=(), prompt_logprobs=scores, trace=TRACE)
        for index, start in enumerate(starts):
            if index == self.stall_at:
                await self._stall()
            if index == self.fail_at:
                raise self.failure
            await asyncio.sleep(0)
            self.pieces += 1
            new = tuple(tokens[start : start + self.per_piece])
            asked = request.sampling.logprobs
            yield StreamPiece(
                tokens=new,
                logprobs=() if asked is None else tuple(scored(token, asked) for token in new),
                trace=TRACE,
                finish=finish if start == starts[-1] else None,
            )

    async def status(self) -> FleetStatus:
        return FleetStatus(workers=self.workers)

    async def release(self, tenant: str, session: str) -> None:
        self.orders.append((tenant, session))

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def carry_out(self, order: Order[AnswerT]) -> AnswerT:
        answer: Any = self._answer(order)
        return answer

    def _answer(self, order: object) -> object:
        names = {row.info.name for row in self.workers}
        if isinstance(order, SetBudget | Drain) and order.worker not in names:
            raise RequestError(f"there is no worker {order.worker!r}", param="worker", status=404)
        match order:
            case Roles():
                return (self.scaled,)
            case SetBudget(worker, budget_bytes):
                return self.budgets.append((worker, budget_bytes))
            case Scale(counts, pending):
                if counts.get("mixed"):
                    raise RequestError("there was no mixed worker at the start", param="workers")
                self.scaled = replace(self.scaled, workers=counts.get("decode", self.scaled.workers))
                answer = "decode-1 needs a GPU" if pending else None
            case Drain() | SetRole():
                answer = None
            case _:
                answer = MembersAnswer(edges=(), join="10.0.0.1:20002")
        self.orders.append(order)
        return answer


def scored(token: int, count: int) -> TokenLogprob:
    """Return the fake's logprobs: each token has its own, and the most likely ones are always the same."""
    return TokenLogprob(-token / 64, tuple((10 + place, -place / 8) for place in range(count)))


def sources(seed: int = 0) -> Sources:
    """Ids that count up, a clock that ticks at each look, seeded randomness."""
    ids, ticks = count(), count()
    return Sources(
        clock_s=lambda: next(ticks) / 64,
        unix_time_s=lambda: 1_700_000_123.5,
        new_id=lambda: f"id{next(ids)}",
        rng=Random(seed),
    )


@cache
def tokenizer() -> FolderTokenizer:
    return load_tokenizer(KEEPER)


def saying(text: str, *, eos: bool = True) -> Callable[[Request], list[int]]:
    """A script: these words, then the end of the sequence."""
    tokens = tokenizer().encode(text)
    return lambda _: [*tokens, EOS] if eos else tokens


def app_over(
    *services: FakeService,
    tokens: FolderTokenizer | None = None,
    source: Sources | None = None,
    **options: Any,  # noqa: ANN401 - of `open_context`
) -> FastAPI:
    """Return the HTTP application over these services, with keeper's tokenizer or another one."""
    served = [ServedBackend(service, tokens or tokenizer()) for service in services]
    return app_of(open_context(served, source or sources(), **options))


async def exchange(app: FastAPI, method: str, path: str, **content: Any) -> httpx.Response:  # noqa: ANN401 - as httpx takes it
    """One request, in process."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        return await client.request(method, path, **content)


def call(app: FastAPI, method: str, path: str, **content: Any) -> httpx.Response:  # noqa: ANN401 - as httpx takes it
    """One request, in process and in a loop of its own."""
    return asyncio.run(exchange(app, method, path, **content))


def post(app: FastAPI, path: str, body: object, **headers: str) -> httpx.Response:
    """Send a body: bytes as they are, other data as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(app, "POST", path, content=content, headers={"content-type": "application/json", **headers})


def complete(app: FastAPI, **body: object) -> dict[str, Any]:
    """The answer of /v1/completions."""
    response = call(app, "POST", "/v1/completions", json={"prompt": "Hello", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: httpx.Response) -> list[Any]:
    """The bodies of a stream's data lines; [DONE] as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def chat(app: FastAPI, **body: object) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello!"}]
    return call(app, "POST", "/v1/chat/completions", json={"messages": messages, **body})


def with_server(served: FakeService | FastAPI, use: Callable[[str], Result]) -> Result:
    """Serve an application, or that of a service; return the result of `use`, which gets the URL, on a
    thread."""
    app = app_over(served) if isinstance(served, FakeService) else served

    async def main() -> Result:
        async with serving(app) as url:
            return await asyncio.to_thread(use, url)

    return asyncio.run(main())


@asynccontextmanager
async def serving(
    app: FastAPI, tls: Tls | None = None, limits: EdgeLimits | None = None
) -> AsyncGenerator[str]:
    """Yield the base URL of `app` behind a real socket, which listens from the start."""
    http = with_limits(EdgeLimits() if limits is None else limits)
    scheme = "http" if tls is None else "https"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # a slow reader shows soon
        config = uvicorn.Config(app, http=http, log_level="critical", ws="none", lifespan="off")
        config.timeout_graceful_shutdown = 30  # when a test has failed, requests may wait for it
        server = EdgeServer(config, tls_context(tls))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running
