"""The life of one request. Start reading here."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

from tidemill.cluster.placement import Ask, Route
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    Delta,
    PagesMissing,
    Piece,
    Produced,
    Request,
    Trace,
    Unserved,
    WorkerGone,
    WorkerId,
)

ATTEMPTS_MAX = 16
PATIENT_ATTEMPTS = 2
"""Attempts that insist on fetched pages; later ones let the decode worker compute whatever is missing, so
that a store that loses everything makes answers slow and never makes them fail."""


class Router(Protocol):
    async def place(self, ask: Ask) -> Route: ...
    async def lost(self, worker: WorkerId) -> None: ...


class Peers(Protocol):
    """The workers, wherever they are. Every call raises PagesMissing or WorkerGone."""

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced: ...
    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None: ...
    def generate(self, worker: WorkerId, address: str, request: Request) -> AsyncGenerator[Delta]: ...


async def serve(
    request: Request,
    router: Router,
    peers: Peers,
    root_of: Callable[[str], PageKey],
    page_tokens: int,
) -> AsyncGenerator[Piece]:
    """Stream the tokens of `request`, placing it again whenever a worker or a page is lost.

    Pages are named by their tokens and a draw is a function of (seed, position), so a retry is an ordinary
    request whose prompt also holds what was already streamed. `root_of(salt)` is the namespace's root key.
    Raises Unserved.
    """
    streamed: list[int] = []
    avoid: frozenset[WorkerId] = frozenset()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        rest = _continued(request, streamed)
        route = await router.place(_ask(rest, root_of(rest.salt), page_tokens, avoid))
        at = route.decode
        try:
            produced: Produced | None = None
            if route.prefill is not None:
                at = route.prefill
                async with _prefetching(peers, route, rest):
                    produced = await peers.produce(route.prefill, route.prefill_address, rest)
            at = route.decode
            patient = attempt <= PATIENT_ATTEMPTS and _is_stored(produced, rest, page_tokens)
            sent = replace(rest, gap_tokens_max=route.gap_tokens_max if patient else None)
            trace: Trace | None = None
            async with aclosing(peers.generate(route.decode, route.decode_address, sent)) as deltas:
                async for delta in deltas:
                    if delta.provenance is not None:
                        trace = _trace(attempt, route, produced, delta)
                    assert trace is not None, "the first delta of a stream says where its prompt came from"
                    streamed += delta.tokens
                    yield Piece(
                        tokens=delta.tokens, logprobs=delta.logprobs, finish=delta.finish, trace=trace
                    )
                    if delta.finish is not None:
                        return
            raise WorkerGone(f"{at} ended a stream that was not finished")
        except PagesMissing:
            continue
        except WorkerGone:
            avoid |= {at}
            await router.lost(at)
    raise Unserved(f"{ATTEMPTS_MAX} attempts failed: see `tidemill status` for the workers' state")


@asynccontextmanager
async def _prefetching(peers: Peers, route: Route, request: Request) -> AsyncGenerator[None]:
    """Inside, the decode worker fetches pages as the prefill worker stores them; it has stopped, or has been
    told to, before the request goes there. What it did not fetch it fetches then: no failure matters."""

    async def prefetch() -> None:
        with suppress(TidemillError):
            await peers.prefetch(route.decode, route.decode_address, request)

    task = asyncio.create_task(prefetch())
    try:
        yield
    finally:
        if not task.done():  # to cancel one that broke would silence the loop's report of it
            task.cancel()
            await asyncio.wait([task])


def _ask(request: Request, root: PageKey, page_tokens: int, avoid: frozenset[WorkerId]) -> Ask:
    end = restorable_end(len(request.tokens), page_tokens)
    keys = page_keys(root, request.tokens[:end], page_tokens)
    return Ask(
        request_id=request.request_id,
        keys=tuple(key[:ANNOUNCED_KEY_BYTES] for key in keys),
        num_tokens=len(request.tokens),
        max_new_tokens=request.max_new_tokens,
        avoid=avoid,
    )


def _continued(request: Request, streamed: Sequence[int]) -> Request:
    """What is left of `request` after `streamed`: these tokens are part of the prompt now."""
    return replace(
        request,
        tokens=(*request.tokens, *streamed),
        max_new_tokens=request.max_new_tokens - len(streamed),
        drawn=request.drawn + len(streamed),
    )


def _is_stored(produced: Produced | None, request: Request, page_tokens: int) -> bool:
    """Whether there are pages to insist on: the store took what the prefill worker made, if one was asked."""
    return produced is None or produced.depth == restorable_end(len(request.tokens), page_tokens)


def _trace(attempt: int, route: Route, produced: Produced | None, first: Delta) -> Trace:
    assert first.provenance is not None
    return Trace(
        attempts=attempt,
        prefill=route.prefill,
        decode=route.decode,
        produced=produced,
        provenance=first.provenance,
    )
