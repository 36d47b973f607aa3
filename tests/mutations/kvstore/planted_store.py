"""Bugs to plant in the stores, in what publishes and prefetches, and in the staging ring."""

from tests.mutations.planted import STORE, UNIT, Planted

PREFETCH = f"{UNIT}/workers/engine/test_prefetcher.py"
STAGING = f"{UNIT}/workers/transfer/test_staging.py"
REMOTE = f"{UNIT}/kvstore/stores/test_remote_store.py"
TIERED = f"{UNIT}/kvstore/stores/test_tiered_store.py"
FILES = f"{UNIT}/kvstore/stores/test_file_store.py {UNIT}/kvstore/stores/test_file_store_faults.py"
GUARD = f"{UNIT}/kvstore/stores/test_circuit_breaker.py"

PUBLISHING_BUGS = (
    Planted(
        "pages that the store refused count as there",
        "workers/engine/publisher.py",
        """                if publication.complete:
                    publication.there_pages""",
        """                if publication:
                    publication.there_pages""",
        PREFETCH,
    ),
    Planted(
        "what was to follow a refused piece stays held",
        "workers/engine/publisher.py",
        "            while pieces:  # nothing",
        "            while pieces and publication.complete:  # nothing",
        PREFETCH,
    ),
    Planted(
        "the checkpoint of a junction is dropped for later pages",
        "workers/engine/publisher.py",
        "if len(pieces) > 1 and not pieces[-1].checkpoint:",
        "if len(pieces) > 1:",
        f"{PREFETCH} {STORE}",
    ),
    Planted(
        "what waits to be put piles up",
        "workers/engine/publisher.py",
        "if len(pieces) > 1 and not pieces[-1].checkpoint:",
        "if len(pieces) > 9 and not pieces[-1].checkpoint:",
        f"{PREFETCH} {STORE}",
    ),
    Planted(
        "a prefill worker answers when the store does",
        "workers/engine/publisher.py",
        "timeout=self._transfer.patience_s(missing)",
        "timeout=None",
        PREFETCH,
    ),
    Planted(
        "answers publish however much is being published",
        "workers/engine/publisher.py",
        "len(self._running) >= PUBLICATIONS_MAX",
        "len(self._running) < 0",
        STORE,
    ),
    Planted(
        "a prefetch takes the last memory",
        "workers/engine/prefetcher.py",
        "pages_beside=num_pages - first",
        "pages_beside=0",
        PREFETCH,
    ),
    Planted(
        "a late prefetch gives its memory back under the transfer",
        "workers/engine/prefetcher.py",
        "            await asyncio.wait(late)\n",
        "",
        PREFETCH,
    ),
    Planted(
        "a cancelled prefetch gives its memory back under the transfer",
        "workers/engine/prefetcher.py",
        "await asyncio.shield(task)",
        "await task",
        PREFETCH,
    ),
    Planted(
        "a request does not wait for the pages that are on their way to it",
        "workers/engine/prefetcher.py",
        "        await _within(self._transfer.patience_s(AHEAD_PAGES_MAX), prefetch.over)\n",
        "",
        PREFETCH,
    ),
    Planted(
        "a request waits for a prefetch however late it is",
        "workers/engine/prefetcher.py",
        "_within(self._transfer.patience_s(AHEAD_PAGES_MAX), prefetch.over)",
        "_within(None, prefetch.over)",
        PREFETCH,
    ),
    Planted(
        "a prefetch asks again at the same pace for ever",
        "workers/engine/prefetcher.py",
        "poll_s = min(2 * poll_s, POLL_S_MAX)",
        "poll_s = POLL_S_MIN",
        PREFETCH,
    ),
    Planted(
        "a prefetch asks for a whole prompt at once",
        "workers/engine/prefetcher.py",
        "keys[here : here + AHEAD_PAGES_MAX]",
        "keys[here:]",
        PREFETCH,
    ),
    Planted(
        "what was prefetched counts as reused",
        "workers/engine/prefetcher.py",
        "prefetch.pages = range(first, here)",
        "prefetch.pages = range(here, here)",
        PREFETCH,
    ),
    Planted(
        "a piece is stored before the one before it",
        "workers/transfer/staging.py",
        """            if before is not None:
                await asyncio.wait({before})
""",
        "",
        STAGING,
    ),
    Planted(
        "a piece is stored behind one that was lost",
        "workers/transfer/staging.py",
        "            if _ends_in_loss(before):\n",
        "            if not piece:\n",
        STAGING,
    ),
    Planted(
        "what did not arrive overwrites the arena",
        "workers/transfer/staging.py",
        "if outcome is Got.HIT",
        "if outcome",
        STAGING,
    ),
)

STORE_BUGS = (
    Planted(
        "a put is believed",
        "kvstore/stores/remote_store.py",
        "return Put.UNCONFIRMED if said is Put.STORED else said",
        "return said",
        REMOTE,
    ),
    Planted(
        "a remote store is given a checkpoint with its pages",
        "kvstore/stores/remote_store.py",
        "key.kind is not objects[start][0].kind",
        "key.kind is None",
        REMOTE,
    ),
    Planted(
        "one name comes twice in a batch",
        "kvstore/stores/remote_store.py",
        "                or key in named\n",
        "",
        REMOTE,
    ),
    Planted(
        "the next seals are written over those that move",
        "kvstore/stores/remote_store.py",
        "one if index % 2 else other",
        "one",
        REMOTE,
    ),
    Planted(
        "each batch finds out by itself that the master is gone",
        "kvstore/stores/remote_store.py",
        "        if lost:\n",
        "        if len(lost) > 9:\n",
        REMOTE,
    ),
    Planted(
        "no space for a moment is no space",
        "kvstore/stores/remote_store.py",
        "for pause_s in NO_SPACE_PAUSES_S:",
        "for pause_s in NO_SPACE_PAUSES_S[:0]:",
        REMOTE,
    ),
    Planted(
        "a batch moves longer than its lease",
        "kvstore/stores/remote_store.py",
        "num_bytes_max = min(BATCH_BYTES_MAX, self._rate.bytes_per_s * self._lease_s / 2)",
        "num_bytes_max = BATCH_BYTES_MAX",
        REMOTE,
    ),
    Planted(
        "what a tier takes is read from the caller's memory",
        "kvstore/stores/tiered_store.py",
        "_Offer(hit.key, memory[end - hit.view.nbytes : end], tiers)",
        "_Offer(hit.key, hit.view, tiers)",
        TIERED,
    ),
    Planted(
        "a copy is made for a tier that is down",
        "kvstore/stores/tiered_store.py",
        " and not tier.store.stats().is_down",
        "",
        TIERED,
    ),
    Planted(
        "a get that is cancelled takes the memory for copies with it",
        "kvstore/stores/tiered_store.py",
        """            self._memory = memory
            raise
""",
        "            raise\n",
        TIERED,
    ),
    Planted(
        "a chain closes under its last put",
        "kvstore/stores/tiered_store.py",
        "            await self._offering\n",
        "            pass\n",
        TIERED,
    ),
    Planted(
        "an object is refused because the nearest tier is full",
        "kvstore/stores/tiered_store.py",
        "return next(chain(there, tried), Put.SKIPPED)",
        "return next(chain(tried, there), Put.SKIPPED)",
        TIERED,
    ),
    Planted(
        "a memory tier is waited for, so all are",
        "kvstore/stores/tiered_store.py",
        " if limit_s < math.inf)",
        ")",
        TIERED,
    ),
    Planted(
        "what others are about to write does not count",
        "kvstore/stores/folder_bound.py",
        "total = FolderUsage(total.objects + left.objects, total.bytes + left.bytes)",
        "total = FolderUsage(total.objects, total.bytes)",
        FILES,
    ),
    Planted(
        "the promises of the dead count for ever",
        "kvstore/stores/folder_bound.py",
        "None if _lock(fd) else _read_usage(fd)",
        "_read_usage(fd)",
        FILES,
    ),
    Planted(
        "what was promised and not written stays taken",
        "kvstore/stores/folder_bound.py",
        "self._write_usage(usage_fd, _less(usage, promise.left))",
        "self._write_usage(usage_fd, usage)",
        FILES,
    ),
    Planted(
        "what was used last goes first",
        "kvstore/stores/folder_bound.py",
        "return sorted(_files(self.objects))",
        "return sorted(_files(self.objects), reverse=True)",
        FILES,
    ),
    Planted(
        "a folder evicts one object at a time",
        "kvstore/stores/folder_bound.py",
        "limit_bytes - limit_bytes // _SLACK",
        "limit_bytes",
        FILES,
    ),
    Planted(
        "a put evicts what it has just found",
        "kvstore/stores/folder_bound.py",
        "if file.path not in keep:",
        "if file.path:",
        f"{FILES} {UNIT}/kvstore/stores/test_store_contract.py",
    ),
    Planted(
        "a writer that came second has stored it, too",
        "kvstore/stores/object_folder.py",
        "    except FileExistsError:\n        return False",
        "    except FileExistsError:\n        return True",
        FILES,
    ),
    Planted(
        "a disk that others fill is not left to them",
        "kvstore/stores/object_folder.py",
        "self._bound.give_way(left_bytes, keep)",
        "pass",
        FILES,
    ),
    Planted(
        "a large batch of files comes back in another order",
        "kvstore/stores/file_store.py",
        "for start, end in pairwise(cuts)]",
        "for start, end in [*pairwise(cuts)][::-1]]",
        FILES,
    ),
    Planted(
        "a put that was not answered leaves the breaker closed",
        "kvstore/stores/circuit_breaker.py",
        "            if lost in outcomes:\n                fail()\n",
        "",
        GUARD,
    ),
    Planted(
        "a late transfer shortens the pauses between trials",
        "kvstore/stores/circuit_breaker.py",
        "now_s - started <= self.patience_s(num_bytes):",
        "now_s >= started:",
        GUARD,
    ),
    Planted(
        "a transfer behind others is found late",
        "kvstore/stores/circuit_breaker.py",
        "self.patience_s(self._moving_bytes)",
        "self.patience_s(num_bytes)",
        GUARD,
    ),
    Planted(
        "waiting behind others counts as moving slowly",
        "kvstore/stores/circuit_breaker.py",
        "now_s - max(started, self._moved_last_s)",
        "now_s - started",
        GUARD,
    ),
)
