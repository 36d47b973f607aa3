"""Fetch the pages of a prompt while another worker still computes it, as they appear in the store.

The pages are kept in the prefix index like any other. The request that follows finds them there, and fetches
what is missing. So a prefetch may stop at any moment, and its memory may be taken away.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PAGES
from tidemill.kvstore.memory.lease import Lease, SequenceText
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.messages import Request
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.transfer.transfer import Transfer

AHEAD_PAGES_MAX = 64
"""The maximum number of pages that are looked up and fetched together."""

POLL_S_MIN, POLL_S_MAX = 0.005, 0.1
REMEMBERED_MAX = 1024


@dataclass(slots=True, eq=False)
class _Prefetch:
    """The progress of a prefetch: `pages` of a prompt, half-open, came from the store."""

    text: SequenceText
    pages: range = range(0)
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it holds nothing and moves nothing


class Prefetcher:
    def __init__(self, ledger: Ledger, transfer: Transfer, admission_queue: AdmissionQueue) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._admission_queue = admission_queue
        self._of: OrderedDict[str, _Prefetch] = OrderedDict()
        self._running: set[asyncio.Task[int]] = set()
        self._serial = 0

    async def run(self, request: Request, keys: list[PageKey]) -> int:
        """Return how many pages of `keys` are here when all of them are, when memory is short, or when the
        store is late. Cancelled, it ends immediately, and pages on their way are still kept."""
        text = SequenceText(request.tokens, request.salt, request.tenant)
        prefetch = self._of[request.request_id] = _Prefetch(text)
        if len(self._of) > REMEMBERED_MAX:
            self._of.popitem(last=False)
        self._serial += 1
        lease_id = f"{request.request_id}/prefetch#{self._serial}"
        task = asyncio.create_task(self._follow(lease_id, keys, prefetch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        finally:
            prefetch.unwanted.set()

    async def take(self, request: Request) -> range:
        """Wait until no more pages of the request are on their way, and return those that were fetched."""
        prefetch = self._of.pop(request.request_id, None)
        if prefetch is None:
            return range(0)
        prefetch.unwanted.set()
        await _within(self._transfer.patience_s(AHEAD_PAGES_MAX), prefetch.over)
        return prefetch.pages

    async def _follow(self, lease_id: str, keys: list[PageKey], prefetch: _Prefetch) -> int:
        """Fetch pages as they appear. It holds pages only while it fetches: running requests may need the
        memory."""
        first = here = len(self._ledger.index.match(keys).path)
        poll_s = POLL_S_MIN
        try:
            while here < len(keys):
                stored = await self._transfer.num_stored(keys[here : here + AHEAD_PAGES_MAX])
                if prefetch.unwanted.is_set():
                    break
                if not stored:
                    await _within(poll_s, prefetch.unwanted)
                    poll_s = min(2 * poll_s, POLL_S_MAX)
                    continue
                poll_s = POLL_S_MIN
                good = await self._fetch(lease_id, prefetch.text, keys, here, here + stored)
                if good <= here:
                    break
                here = good
                prefetch.pages = range(first, here)
            return here
        finally:
            prefetch.over.set()

    async def _fetch(
        self, lease_id: str, text: SequenceText, keys: list[PageKey], here: int, num_pages: int
    ) -> int:
        """Fetch pages and return how many are here; no more than `here` when it has to end."""
        lease = self._ledger.open(lease_id, runs=False, text=text)
        try:
            match = self._ledger.index.match(keys)
            if len(match.path) < here:  # memory is short: some were evicted
                return here
            self._ledger.attach(lease, match, len(match.path))
            first = len(lease.shared_entries)
            if first >= num_pages:
                return first
            return await self._fill(lease, keys, first, num_pages)
        finally:
            self._ledger.release(lease_id)
            self._admission_queue.memory_freed()

    async def _fill(self, lease: Lease, keys: list[PageKey], first: int, num_pages: int) -> int:
        size = self._ledger.layout.page_tokens
        try:  # as many again are left for running requests
            self._ledger.reserve(lease, num_pages * size, headroom={PAGES: num_pages - first})
        except OutOfMemory:
            return first
        late: list[asyncio.Future[int]] = []
        good = await self._transfer.fetch(lease, keys, num_pages, late.append)
        if late:
            await asyncio.wait(late)
            return first
        if good > first:
            self._ledger.adopt(lease, good * size, keys)
        return good


async def _within(timeout_s: float | None, event: asyncio.Event) -> None:
    """Wait until `event` is set, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
