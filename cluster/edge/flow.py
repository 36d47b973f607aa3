"""The life of one request. Start reading here."""

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from tidemill.cluster.edge.cache_misses import explain
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.inbox import Emit, Pause
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    BREAKPOINTS_MAX,
    CrashedAlone,
    Delta,
    EngineInfo,
    HandedOver,
    LostAlone,
    PagesMissing,
    Poisonous,
    Produced,
    Request,
    RequestError,
    StreamPiece,
    Trace,
    Unserved,
    WorkerGone,
    WorkerId,
    features_of,
)

ATTEMPTS_MAX = 16
TOGETHER_MAX = 4
"""The maximum number of attempts where requests never run alone: any of those that ran together on a worker
that was lost may be the cause."""

PATIENT_ATTEMPTS = 2
"""The attempts that insist on fetched pages. Later attempts let the decode worker compute whatever is
missing, so that a store that loses everything slows answers and never fails them."""


WAIT_S_MAX = 60.0
"""The longest wait for a router, and for a worker to start, of a model that always has workers."""

BEGUN_WAIT_S_MAX = 300.0
"""The same for a stream that has begun and lost its worker: as long as a large engine takes to start."""

HAND_OVERS_MAX = 64
HAND_OVER_PAUSE_S = 0.1
"""The pause before a request returns to a worker that refused it, because the router may not know yet."""


class RequestRouter(Protocol):
    async def place(self, request: PlacementRequest) -> Route: ...
    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None: ...


class WorkerStreams(Protocol):
    """The workers of a fleet. Every call raises PagesMissing or WorkerGone. It raises HandedOver if the
    worker was ordered not to do this work, and CrashedAlone or LostAlone if the worker was lost while it ran
    this request alone."""

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced: ...
    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None: ...
    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None: ...


async def serve(
    request: Request,
    router: RequestRouter,
    peers: WorkerStreams,
    root_of: Callable[[str], PageKey],
    info: EngineInfo,
    emit: Emit[StreamPiece],
    wait_s_max: float = WAIT_S_MAX,
) -> None:
    """Emit the tokens of `request`, placing it again whenever a worker or a page is lost.

    Pages are named by their tokens and a draw is a function of (seed, position). A retry is therefore an
    ordinary request whose prompt includes what was already streamed. After a loss it runs in isolation,
    because it may be what crashed the worker. An engine that is not exact, at least with features of this
    request, would continue with other tokens, so a stream that has begun ends with its worker.
    `root_of(salt)` is the namespace's root key. Raises Unserved, Overloaded, Poisonous, RequestError.
    """
    page_tokens, features = info.page_tokens, features_of(request)
    if refused := sorted(features & {*info.refuses}):
        raise RequestError(f"the engine of this model has no {' and '.join(refused)}: leave that out")
    inexact = "" if info.exact else "anything"
    inexact = inexact or " and ".join(sorted(features & {*info.inexact_with}))
    progress = RequestProgress(request, content_hash_of(request), wait_s_max)
    attempts_max = ATTEMPTS_MAX if info.isolates else TOGETHER_MAX
    while progress.attempt <= attempts_max and progress.hand_overs <= HAND_OVERS_MAX:
        rest = progress.remaining_request()
        began_s = asyncio.get_running_loop().time()
        route = await router.place(progress.placement_request(rest, root_of(request.salt), page_tokens))
        progress.placed_s += asyncio.get_running_loop().time() - began_s
        rest = replace(
            rest,
            queue_offset_s=route.queue_offset_s,
            breakpoints=with_shared_end(rest.breakpoints, route.shared_pages, page_tokens),
        )
        at = route.decode
        try:
            produced: Produced | None = None
            if route.prefill is not None:
                at = route.prefill
                async with _prefetching(peers, route, rest):
                    produced = await peers.produce(route.prefill, route.prefill_address, rest)
            at = route.decode
            patient = progress.attempt <= PATIENT_ATTEMPTS and _is_stored(produced, rest, page_tokens)
            sent = replace(
                rest,
                gap_tokens_max=route.gap_tokens_max if patient else None,
                handoff=produced.handoff if produced else None,
            )
            take = progress.take(emit, route, produced, sent, page_tokens)
            await peers.stream(route.decode, route.decode_address, sent, take)
            if progress.finished:
                return
            raise WorkerGone(f"{at} ended a stream that was not finished")
        except (PagesMissing, WorkerGone) as error:
            await progress.on_failure(at, error, router)
            if progress.streamed and inexact:
                raise Unserved(
                    f"{error}: the engine cannot continue a stream exactly with {inexact}"
                ) from error
    raise Unserved(
        f"{progress.attempt - 1} attempts failed and {progress.hand_overs} workers handed it over: "
        "see `tidemill status` for the workers' state"
    )


@dataclass(slots=True)
class RequestProgress:
    """The progress of a request."""

    request: Request
    content: bytes
    wait_s_max: float = WAIT_S_MAX  # for a router, and for a worker to start
    attempt: int = 1
    hand_overs: int = 0  # planned ones, which are not failures
    streamed: list[int] = field(default_factory=list[int])
    scored: int = 0  # logprobs of the prompt, before any token was streamed
    avoid: frozenset[WorkerId] = frozenset()
    on_trial: bool = False
    silenced: bool = (
        False  # a worker fell silent while it ran the request alone; a second one is no coincidence
    )
    placed_s: float = 0.0  # seconds that routers took
    finished: bool = False

    def remaining_request(self) -> Request:
        """Return the rest of the request; what was streamed is part of its prompt."""
        return replace(
            self.request,
            tokens=(*self.request.tokens, *self.streamed),
            max_new_tokens=self.request.max_new_tokens - len(self.streamed),
            drawn=self.request.drawn + len(self.streamed),
            scored=self.scored,
            on_trial=self.on_trial,
        )

    def placement_request(self, rest: Request, root: PageKey, page_tokens: int) -> PlacementRequest:
        whole = rest.scored < rest.to_score
        end = restorable_end(rest.scored + 1 if whole else len(rest.tokens), page_tokens)
        keys = page_keys(root, rest.tokens[:end], page_tokens)
        is_first = self.attempt == 1 and not self.hand_overs
        wait_s_max = max(self.wait_s_max, BEGUN_WAIT_S_MAX) if self.streamed else self.wait_s_max
        return PlacementRequest(
            request_id=rest.request_id,
            keys=tuple(key[:ANNOUNCED_KEY_BYTES] for key in keys),
            num_tokens=len(rest.tokens),
            max_new_tokens=rest.max_new_tokens,
            avoid=self.avoid,
            tenant=rest.tenant,
            ttft_s_max=rest.ttft_s_max,
            resumed=not is_first,
            content_hash=self.content,
            recompute_all=whole,
            pools=rest.pools,
            wait_s_max=min(wait_s_max, rest.ttft_s_max or math.inf) if is_first else wait_s_max,
        )

    def take(
        self,
        emit: Emit[StreamPiece],
        route: Route,
        produced: Produced | None,
        sent: Request,
        page_tokens: int,
    ) -> Emit[Delta]:
        """Return a function that passes on the deltas of an attempt, and asks for none of them again."""
        trace: Trace | None = None

        def take(delta: Delta) -> Pause | None:
            nonlocal trace
            if delta.provenance is not None:
                trace = Trace(
                    attempts=self.attempt,
                    hand_overs=self.hand_overs,
                    placed_s=self.placed_s,
                    prefill=route.prefill,
                    decode=route.decode,
                    produced=produced,
                    provenance=delta.provenance,
                    misses=explain(sent, route, produced, delta.provenance, page_tokens),
                )
            assert trace is not None, "the first delta of a stream has the source of its prompt"
            self.streamed += delta.tokens
            self.scored += len(delta.prompt_logprobs)
            self.finished = delta.finish is not None
            logprobs, pooled = (delta.logprobs, delta.prompt_logprobs), delta.pooled
            return emit(StreamPiece(delta.tokens, trace, *logprobs, delta.finish, pooled))

        return take

    async def on_failure(self, at: WorkerId, error: PagesMissing | WorkerGone, router: RequestRouter) -> None:
        """Record that an attempt ended at this worker. Raises Poisonous."""
        match error:
            case PagesMissing():
                self.attempt += 1
                return
            case HandedOver():
                self.hand_overs += 1
                if at in self.avoid:
                    await asyncio.sleep(HAND_OVER_PAUSE_S)
            case LostAlone() if not self.silenced:
                self.attempt += 1
                self.silenced = True
                await router.report_lost(at)
            case CrashedAlone() | LostAlone():
                await router.report_lost(at, self.content)
                raise Poisonous(f"workers are lost with this request, the last ran nothing else: {error}")
            case WorkerGone():
                self.attempt += 1
                self.on_trial = True
                await router.report_lost(at)
        self.avoid |= {at}


@asynccontextmanager
async def _prefetching(peers: WorkerStreams, route: Route, request: Request) -> AsyncGenerator[None]:
    """Let the decode worker fetch pages, inside the block, while the prefill worker stores them. On leaving
    it has stopped or been cancelled; the request fetches the rest, so no failure matters."""

    async def prefetch() -> None:
        with suppress(TidemillError):
            await peers.prefetch(route.decode, route.decode_address, request)

    task = asyncio.create_task(prefetch())
    try:
        yield
    finally:
        if not task.done():  # cancelling a failed task would silence the loop's report of it
            task.cancel()
            await asyncio.wait([task])


def content_hash_of(request: Request) -> bytes:
    """Return 16 bytes that name the content, independent of its sender and of its seed."""
    terms = (
        request.max_new_tokens,
        replace(request.sampling, seed=0, seeded=False),
        request.stop_token_ids,
        request.salt,
    )
    digest = blake2b(repr(terms).encode(errors="surrogatepass"), digest_size=16)
    digest.update(array("Q", request.tokens).tobytes())
    return digest.digest()


def with_shared_end(breakpoints: tuple[int, ...], shared_pages: int, page_tokens: int) -> tuple[int, ...]:
    """Return the breakpoints and, unless there are as many as may be, the depth of `shared_pages` pages."""
    kept_pages = {0, *(depth // page_tokens for depth in breakpoints)}
    if shared_pages in kept_pages or len(breakpoints) == BREAKPOINTS_MAX:
        return breakpoints
    return tuple(sorted((*breakpoints, shared_pages * page_tokens)))


def _is_stored(produced: Produced | None, request: Request, page_tokens: int) -> bool:
    """Return whether there are pages to insist on: the store took those of the prefill worker."""
    return produced is None or produced.depth == restorable_end(len(request.tokens), page_tokens)
