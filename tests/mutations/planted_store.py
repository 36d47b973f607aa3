"""Bugs to plant in the stores, in what publishes and prefetches, and in the staging ring."""

from tests.mutations.planted import STORE, UNIT, Planted

PREFETCH = f"{UNIT}/workers/test_prefetch.py"
STAGING = f"{UNIT}/workers/test_staging.py"
REMOTE = f"{UNIT}/kvstore/test_remote_store.py"
TIERED = f"{UNIT}/kvstore/test_tiered_store.py"
FILES = f"{UNIT}/kvstore/test_file_store.py {UNIT}/kvstore/test_file_store_faults.py"
GUARD = f"{UNIT}/kvstore/test_guard.py"

PUBLISHING_BUGS = (
    Planted(
        "pages that the store refused count as there",
        "workers/publications.py",
        """                if publication.complete:
                    publication.there_pages""",
        """                if publication:
                    publication.there_pages""",
        PREFETCH,
    ),
    Planted(
        "what was to follow a refused piece stays held",
        "workers/publications.py",
        "            while pieces:  # nothing",
        "            while pieces and publication.complete:  # nothing",
        PREFETCH,
    ),
    Planted(
        "the checkpoint of a junction is dropped for later pages",
        "workers/publications.py",
        "if len(pieces) > 1 and not pieces[-1].checkpoint:",
        "if len(pieces) > 1:",
        f"{PREFETCH} {STORE}",
    ),
    Planted(
        "what waits to be put piles up",
        "workers/publications.py",
        "if len(pieces) > 1 and not pieces[-1].checkpoint:",
        "if len(pieces) > 9 and not pieces[-1].checkpoint:",
        f"{PREFETCH} {STORE}",
    ),
    Planted(
        "a prefill worker answers when the store does",
        "workers/publications.py",
        "timeout=self._transfer.patience_s(missing)",
        "timeout=None",
        PREFETCH,
    ),
    Planted(
        "answers publish however much is being published",
        "workers/publications.py",
        "len(self._running) >= PUBLICATIONS_MAX",
        "len(self._running) < 0",
        STORE,
    ),
    Planted(
        "a prefetch takes the last memory",
        "workers/prefetch.py",
        "pages_beside=num_pages - first",
        "pages_beside=0",
        PREFETCH,
    ),
    Planted(
        "a late prefetch gives its memory back under the transfer",
        "workers/prefetch.py",
        "            await asyncio.wait(late)\n",
        "",
        PREFETCH,
    ),
    Planted(
        "a cancelled prefetch gives its memory back under the transfer",
        "workers/prefetch.py",
        "await asyncio.shield(task)",
        "await task",
        PREFETCH,
    ),
    Planted(
        "a request does not wait for the pages that are on their way to it",
        "workers/prefetch.py",
        "        await _within(self._transfer.patience_s(AHEAD_PAGES_MAX), prefetch.over)\n",
        "",
        PREFETCH,
    ),
    Planted(
        "a request waits for a prefetch however late it is",
        "workers/prefetch.py",
        "_within(self._transfer.patience_s(AHEAD_PAGES_MAX), prefetch.over)",
        "_within(None, prefetch.over)",
        PREFETCH,
    ),
    Planted(
        "a prefetch asks again at the same pace for ever",
        "workers/prefetch.py",
        "poll_s = min(2 * poll_s, POLL_S_MAX)",
        "poll_s = POLL_S_MIN",
        PREFETCH,
    ),
    Planted(
        "a prefetch asks for a whole prompt at once",
        "workers/prefetch.py",
        "keys[here : here + AHEAD_PAGES_MAX]",
        "keys[here:]",
        PREFETCH,
    ),
    Planted(
        "what was prefetched counts as reused",
        "workers/prefetch.py",
        "prefetch.pages = range(first, here)",
        "prefetch.pages = range(here, here)",
        PREFETCH,
    ),
    Planted(
        "a piece is stored before the one before it",
        "workers/staging.py",
        """            if before is not None:
                await asyncio.wait({before})
""",
        "",
        STAGING,
    ),
    Planted(
        "a piece is stored behind one that was lost",
        "workers/staging.py",
        "            if _ends_in_loss(before):\n",
        "            if not piece:\n",
        STAGING,
    ),
    Planted(
        "what did not arrive overwrites the arena",
        "workers/staging.py",
        "if outcome is Got.HIT",
        "if outcome",
        STAGING,
    ),
)

STORE_BUGS = (
    Planted(
        "a put is believed",
        "kvstore/remote_store.py",
        "return Put.UNCONFIRMED if said is Put.STORED else said",
        "return said",
        REMOTE,
    ),
    Planted(
        "a remote store is given a checkpoint with its pages",
        "kvstore/remote_store.py",
        "key.kind is not objects[start][0].kind",
        "key.kind is None",
        REMOTE,
    ),
    Planted(
        "one name comes twice in a batch",
        "kvstore/remote_store.py",
        "                or key in named\n",
        "",
        REMOTE,
    ),
    Planted(
        "the next seals are written over those that move",
        "kvstore/remote_store.py",
        "one if index % 2 else other",
        "one",
        REMOTE,
    ),
    Planted(
        "each batch finds out by itself that the master is gone",
        "kvstore/remote_store.py",
        "        if lost:\n",
        "        if len(lost) > 9:\n",
        REMOTE,
    ),
    Planted(
        "no space for a moment is no space",
        "kvstore/remote_store.py",
        "for pause_s in NO_SPACE_PAUSES_S:",
        "for pause_s in NO_SPACE_PAUSES_S[:0]:",
        REMOTE,
    ),
    Planted(
        "a batch moves longer than its lease",
        "kvstore/remote_store.py",
        "num_bytes_max = min(BATCH_BYTES_MAX, self._rate.bytes_per_s * self._lease_s / 2)",
        "num_bytes_max = BATCH_BYTES_MAX",
        REMOTE,
    ),
    Planted(
        "what a tier takes is read from the caller's memory",
        "kvstore/tiered_store.py",
        "_Offer(hit.key, memory[end - hit.view.nbytes : end], tiers)",
        "_Offer(hit.key, hit.view, tiers)",
        TIERED,
    ),
    Planted(
        "a copy is made for a tier that is down",
        "kvstore/tiered_store.py",
        " and not tier.store.stats().is_down",
        "",
        TIERED,
    ),
    Planted(
        "a get that is cancelled takes the memory for copies with it",
        "kvstore/tiered_store.py",
        """            self._memory = memory
            raise
""",
        "            raise\n",
        TIERED,
    ),
    Planted(
        "a chain closes under its last put",
        "kvstore/tiered_store.py",
        "            await self._offering\n",
        "            pass\n",
        TIERED,
    ),
    Planted(
        "an object is refused because the nearest tier is full",
        "kvstore/tiered_store.py",
        "return next(chain(there, tried), Put.SKIPPED)",
        "return next(chain(tried, there), Put.SKIPPED)",
        TIERED,
    ),
    Planted(
        "a memory tier is waited for, so all are",
        "kvstore/tiered_store.py",
        " if limit_s < math.inf)",
        ")",
        TIERED,
    ),
    Planted(
        "what others are about to write does not count",
        "kvstore/folder_bound.py",
        "total = Usage(total.objects + left.objects, total.bytes + left.bytes)",
        "total = Usage(total.objects, total.bytes)",
        FILES,
    ),
    Planted(
        "the promises of the dead count for ever",
        "kvstore/folder_bound.py",
        "None if _lock(fd) else _read_usage(fd)",
        "_read_usage(fd)",
        FILES,
    ),
    Planted(
        "what was promised and not written stays taken",
        "kvstore/folder_bound.py",
        "self._write_usage(usage_fd, _less(usage, promise.left))",
        "self._write_usage(usage_fd, usage)",
        FILES,
    ),
    Planted(
        "what was used last goes first",
        "kvstore/folder_bound.py",
        "return sorted(_files(self.objects))",
        "return sorted(_files(self.objects), reverse=True)",
        FILES,
    ),
    Planted(
        "a folder evicts one object at a time",
        "kvstore/folder_bound.py",
        "limit_bytes - limit_bytes // _SLACK",
        "limit_bytes",
        FILES,
    ),
    Planted(
        "a put evicts what it has just found",
        "kvstore/folder_bound.py",
        "if file.path not in keep:",
        "if file.path:",
        f"{FILES} {UNIT}/kvstore/test_store_contract.py",
    ),
    Planted(
        "a writer that came second has stored it, too",
        "kvstore/object_folder.py",
        "    except FileExistsError:\n        return False",
        "    except FileExistsError:\n        return True",
        FILES,
    ),
    Planted(
        "a disk that others fill is not left to them",
        "kvstore/object_folder.py",
        "self._bound.give_way(left_bytes, keep)",
        "pass",
        FILES,
    ),
    Planted(
        "a large batch of files comes back in another order",
        "kvstore/file_store.py",
        "for start, end in pairwise(cuts)]",
        "for start, end in [*pairwise(cuts)][::-1]]",
        FILES,
    ),
    Planted(
        "a put that was not answered leaves the breaker closed",
        "kvstore/guard.py",
        "            if lost in outcomes:\n                fail()\n",
        "",
        GUARD,
    ),
    Planted(
        "a late transfer shortens the pauses between trials",
        "kvstore/guard.py",
        "now_s - started <= self.patience_s(num_bytes):",
        "now_s >= started:",
        GUARD,
    ),
    Planted(
        "a transfer behind others is found late",
        "kvstore/guard.py",
        "self.patience_s(self._moving_bytes)",
        "self.patience_s(num_bytes)",
        GUARD,
    ),
    Planted(
        "waiting behind others counts as moving slowly",
        "kvstore/guard.py",
        "now_s - max(started, self._moved_last_s)",
        "now_s - started",
        GUARD,
    ),
)
