"""A router and workers that follow the script of a test, for the flow of one request."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from tests.support.waits import WAIT_S_MAX
from tidemill.cluster.edge import flow
from tidemill.cluster.edge.flow import serve
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    Delta,
    EngineInfo,
    FinishReason,
    Produced,
    Provenance,
    Request,
    Sampling,
    StreamPiece,
    TokenLogprob,
    WorkerGone,
    WorkerId,
)

T = TypeVar("T")

P = 4
PROMPT = tuple(range(100, 110))
GAP_TOKENS_MAX = 8
FETCHED = Provenance(fetched_tokens=8, computed_tokens=2)


@dataclass(frozen=True)
class Act:
    """The script of one attempt: the decode worker streams `scores`, then `tokens` more, `per_delta` in each
    delta, and then `end` happens, unless that was all. `prefetch` never ends (None), ends immediately, or
    fails; producing takes `produce_turns` iterations of the loop."""

    prefill: bool = True
    prefetch: Exception | Literal["ends"] | None = None
    produce_turns: int = 1
    produce: Exception | Produced = field(default_factory=lambda: Produced(depth=8, provenance=Provenance()))
    scores: int = 10**9  # logprobs of the prompt, before that
    tokens: int = 10**9
    per_delta: int = 1
    end: Exception | None = None


def nth_token(position: int) -> int:
    return position * position % 97


def nth_score(place: int) -> TokenLogprob:
    return TokenLogprob(-place / 8)


class Script:
    """Router and peers in one; attempt i plays `acts[i]`, the last one for ever."""

    def __init__(self, *acts: Act) -> None:
        self.acts = acts
        self.asks: list[PlacementRequest] = []
        self.lost_workers: list[WorkerId] = []
        self.blamed: list[bytes] = []
        self.queue_offset_s = 0.0
        self.shared_pages = 0
        self.calls: list[tuple[str, Request]] = []
        self.closed = 0
        self.prefetched: list[Request] = []
        self.prefetching = 0  # now

    @property
    def act(self) -> Act:
        return self.acts[min(len(self.asks), len(self.acts)) - 1]

    async def place(self, request: PlacementRequest) -> Route:
        self.asks.append(request)
        attempt = len(self.asks)
        route = Route(
            decode=WorkerId(f"d.{attempt}"),
            decode_address="at:d",
            queue_offset_s=self.queue_offset_s,
            shared_pages=self.shared_pages,
        )
        if not self.act.prefill:
            return route
        return replace(
            route,
            prefill=WorkerId(f"p.{attempt}"),
            prefill_address="at:p",
            gap_tokens_max=GAP_TOKENS_MAX,
        )

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        self.lost_workers.append(worker)
        if blamed:
            self.blamed.append(blamed)

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        assert (worker, address) == (f"p.{len(self.asks)}", "at:p")
        self.calls.append(("produce", request))
        for _ in range(self.act.produce_turns):
            await asyncio.sleep(0)
        if isinstance(self.act.produce, Exception):
            raise self.act.produce
        return self.act.produce

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        assert (worker, address) == (f"d.{len(self.asks)}", "at:d")
        assert request is self.calls[-1][1]
        self.prefetched.append(request)
        self.prefetching += 1
        try:
            match self.act.prefetch:
                case Exception() as failure:
                    raise failure
                case None:
                    await asyncio.Event().wait()
                case "ends":
                    pass
        finally:
            self.prefetching -= 1

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        assert (worker, address) == (f"d.{len(self.asks)}", "at:d")
        assert self.prefetching == 0, "the pages are being fetched for a request that could fetch them"
        self.calls.append(("generate", request))
        act = self.act
        try:
            end = len(request.tokens) + request.max_new_tokens
            stop = min(end, len(request.tokens) + act.tokens)
            provenance: Provenance | None = FETCHED
            scored = min(request.to_score, request.scored + act.scores)
            for start in range(request.scored, scored, act.per_delta):
                await asyncio.sleep(0)
                last = min(start + act.per_delta, scored)
                scores = tuple(map(nth_score, range(start, last)))
                emit(Delta(tokens=(), prompt_logprobs=scores, provenance=provenance))
                provenance = None
            if scored < request.to_score:
                raise act.end or WorkerGone("amid the prompt")
            for start in range(len(request.tokens), stop, act.per_delta):
                await asyncio.sleep(0)
                last = min(start + act.per_delta, stop)
                finish: FinishReason | None = "length" if last == end else None
                emit(
                    Delta(
                        tokens=tuple(map(nth_token, range(start, last))), finish=finish, provenance=provenance
                    )
                )
                provenance = None
                if finish is not None:
                    return
            if act.end is not None:
                raise act.end
            if request.pools:
                emit(Delta(tokens=(), finish="stop", pooled=b"pool", provenance=FETCHED))
        finally:
            self.closed += 1


def a_request(max_new_tokens: int = 6, prompt_logprobs: int | None = None) -> Request:
    return Request(
        request_id="r",
        tokens=PROMPT,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(prompt_logprobs=prompt_logprobs),
        salt="s",
    )


def root_of(salt: str) -> PageKey:
    return Namespace(model="m", layout="l", salt=salt).root()


def run(main: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WAIT_S_MAX):
            return await main

    return asyncio.run(bounded())


INFO = EngineInfo(page_tokens=P)


def pieces_of(
    script: Script, request: Request, wait_s_max: float = flow.WAIT_S_MAX, info: EngineInfo = INFO
) -> list[StreamPiece]:
    """Return all pieces."""
    found: list[StreamPiece] = []
    run(serve(request, script, script, root_of, info, found.append, wait_s_max))
    return found


def check_answer(pieces: list[StreamPiece], request: Request) -> None:
    """Each token exactly once, in order, after each logprob of the prompt; one finish, at the end."""
    scores = [score for piece in pieces for score in piece.prompt_logprobs]
    assert scores == list(map(nth_score, range(request.to_score)))
    begun = [bool(piece.tokens) for piece in pieces]
    assert begun == sorted(begun), "the prompt comes first"
    first = len(request.tokens)
    want = [nth_token(position) for position in range(first, first + request.max_new_tokens)]
    assert [token for piece in pieces for token in piece.tokens] == want
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


class Hold(Script):
    """Peers that produce until the test lets them end; `prefetch` first signals that it runs."""

    def __init__(self) -> None:
        super().__init__(Act())
        self.begun, self.let_end = asyncio.Event(), asyncio.Event()

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        produced = await super().produce(worker, address, request)
        await self.let_end.wait()
        return produced

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        self.begun.set()
        await super().prefetch(worker, address, request)
