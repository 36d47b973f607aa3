"""Prefixes in progress: a request waits for the request that computes its prefix, and computes only the
rest.

    maker       tokens [ system prompt ........ | its own question ]
    follower    tokens [ system prompt ........ | another question ]
                                                ^ the maker's next step leaves a checkpoint here

So a prompt that many requests share is computed once, also when they arrive together, and all others can
restore it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.workers.scheduling.admission_queue import Precedence
from tidemill.workers.scheduling.sequence import Sequence


class InProgressPrefixes:
    def __init__(self, index: PrefixIndex, precedence: Callable[[Sequence, int], Precedence]) -> None:
        """Create an empty registry. `precedence` is the sort key of a sequence that resumes at a depth."""
        self._index = index
        self._precedence = precedence
        self._of: dict[
            PageKey, Sequence
        ] = {}  # the request that will compute this page; no entry once it is computed
        self._followers: defaultdict[str, list[tuple[int, asyncio.Event]]] = defaultdict(list)

    async def wait(self, sequence: Sequence) -> None:
        """Wait while an older or running request computes pages of `sequence`; then become their maker."""
        keys = sequence.keys[: sequence.restorable // sequence.page_tokens]
        while (shared := self._shared(sequence, keys)) is not None:
            maker, depth = shared
            maker.restore.junctions.add(depth)
            reached = asyncio.Event()
            self._followers[maker.id].append((depth, reached))
            await reached.wait()
        depth = self._index.match(keys).restorable_pages * sequence.page_tokens
        for key in keys:
            maker = self._of.get(key)
            if maker is None or self._waits_behind(maker, sequence, depth):
                self._of[key] = sequence

    def is_made(self, sequence: Sequence) -> bool:
        """Return whether another request computes the next page of `sequence`."""
        return (
            self._shared(sequence, sequence.keys[: sequence.restorable // sequence.page_tokens]) is not None
        )

    def advanced(self, sequence: Sequence, before: int) -> None:
        """Record that `sequence` has committed its tokens from `before` on, and kept its checkpoints."""
        size = sequence.page_tokens
        first, end = before // size, sequence.computed // size
        if first == end:
            return
        self._forget(sequence, sequence.keys[first:end])
        followers = self._followers.get(sequence.id)
        if followers:
            self._followers[sequence.id] = [
                follower for follower in followers if follower[0] > sequence.computed
            ]
            for depth, reached in followers:
                if depth <= sequence.computed:
                    reached.set()

    def left(self, sequence: Sequence) -> None:
        """Record that `sequence` has ended or was preempted: its followers find another maker, or become
        one."""
        self._forget(sequence, sequence.keys)
        for _, reached in self._followers.pop(sequence.id, []):
            reached.set()

    def _forget(self, sequence: Sequence, keys: list[PageKey]) -> None:
        for key in keys:
            if self._of.get(key) is sequence:
                del self._of[key]

    def _shared(self, sequence: Sequence, keys: list[PageKey]) -> tuple[Sequence, int] | None:
        """Return the request that computes pages after the restorable ones, and how deep they agree."""
        match = self._index.match(keys)
        # A maker may have left no checkpoint at its last pages yet: those are here, and it is beyond them.
        ahead = range(match.restorable_pages, min(len(keys), len(match.path) + 1))
        end_pages = next((pages for pages in ahead if keys[pages] in self._of), len(keys))
        maker = self._of[keys[end_pages]] if end_pages < len(keys) else None
        if maker is None or maker is sequence:
            return None
        if self._waits_behind(maker, sequence, match.restorable_pages * sequence.page_tokens):
            return None
        while end_pages < len(keys) and self._of.get(keys[end_pages]) is maker:
            end_pages += 1
        return maker, end_pages * sequence.page_tokens

    def _waits_behind(self, maker: Sequence, sequence: Sequence, depth: int) -> bool:
        """Return whether `maker` may get memory after `sequence`, where both resume at `depth`. One that was
        preempted may wait for any older request, so no request waits for it."""
        if maker.lease is not None:
            return False
        later = self._precedence(maker, depth) > self._precedence(sequence, depth)
        return later or maker.restore.preemptions > 0
