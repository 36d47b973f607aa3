"""Bugs to plant in what moves pages and checkpoints, and in how they are cut into shards."""

from tests.mutations.planted import KEYS, UNIT, Planted

TRANSFER = f"{UNIT}/workers/transfer/test_transfer.py"
SHARDS = f"{UNIT}/kvstore/test_shards.py"
GUARD = f"{UNIT}/kvstore/stores/test_circuit_breaker.py {UNIT}/kvstore/stores/test_breaker.py"
STORE_FAULTS = "tests/sim/test_store_faults.py"

TRANSFER_BUGS = (
    Planted(
        "a fetched prompt runs without its state",
        "workers/transfer/transfer.py",
        "wanted.append(Moved(Kind.CHECKPOINT, keys[num_pages - 1], lease.fetch_slot))",
        "pass",
        TRANSFER,
    ),
    Planted(
        "a damaged object is taken for good",
        "workers/transfer/transfer.py",
        "outcome is Got.HIT",
        "outcome is not Got.MISS",
        TRANSFER,
    ),
    Planted(
        "the checkpoint is published before its pages",
        "workers/transfer/transfer.py",
        "self._put(pages + last)",
        "self._put(last + pages)",
        TRANSFER,
    ),
    Planted(
        "the checkpoint is published before the pages of another rank",
        "workers/transfer/transfer.py",
        "self._put(pages) and await self._put(last)",
        "self._put([*pages, *last])",
        TRANSFER,
    ),
    Planted(
        "a fetch fills the wrong pages",
        "workers/transfer/transfer.py",
        "lease.private_pages[index - first]",
        "lease.private_pages[index - num_pages]",
        TRANSFER,
    ),
    Planted(
        "what is good on one rank is good on all",
        "workers/transfer/transfer.py",
        "return min(answer.result()",
        "return max(answer.result()",
        TRANSFER,
    ),
    Planted(
        "the store is asked for the first shard alone",
        "workers/transfer/transfer.py",
        "for shard in range(self._shards[kind])",
        "for shard in range(1)",
        TRANSFER,
    ),
    Planted(
        "a cancelled transfer goes on in leased memory",
        "workers/transfer/transfer.py",
        "await finish(asyncio.gather(*answers, return_exceptions=True))",
        "await asyncio.gather(*answers)",
        TRANSFER,
    ),
    Planted(
        "the states of a rank lie where its pages do",
        "workers/transfer/transfer.py",
        "offset = self._layout.state_offset(StateId(moved.place))",
        "offset = self._layout.page_offset(PageId(moved.place))",
        TRANSFER,
    ),
    Planted(
        "a copy of a page is published by every rank that has it",
        "kvstore/shards.py",
        "publishes_pages=rank % max(1, size // shards.pages) == 0",
        "publishes_pages=rank >= 0",
        f"{SHARDS} {TRANSFER}",
    ),
    Planted(
        "a rank has the shards of another one",
        "kvstore/shards.py",
        "first = rank * count // size",
        "first = (size - 1 - rank) * count // size",
        f"{SHARDS} {TRANSFER}",
    ),
    Planted(
        "copies of heads are dealt out in turn",
        "kvstore/shards.py",
        "first = rank * count // size",
        "first = rank * count // size if size <= count else rank % count",
        f"{SHARDS} {TRANSFER}",
    ),
    Planted(
        "more shards of pages than heads",
        "kvstore/shards.py",
        "lcm(*(min(size, paged) for size in sizes))",
        "lcm(*sizes)",
        SHARDS,
    ),
    Planted(
        "objects that are cut otherwise share a namespace",
        "kvstore/shards.py",
        "return whole.describe() + cut",
        "return whole.describe() + cut[:0]",
        SHARDS,
    ),
    Planted(
        "a shard under the name of another one passes for it",
        "kvstore/stores/seal.py",
        "key.shard, key.key)",
        "0, key.key)",
        f"{UNIT}/kvstore/stores/test_seal.py",
    ),
    Planted(
        "all shards of an object have one name",
        "kvstore/keys.py",
        "{self.shard:04x}",
        "0000",
        KEYS,
    ),
    Planted(
        "the memory of a late fetch is free at once",
        "workers/scheduling/admission.py",
        "moving.add_done_callback(ended)",
        "ended(moving)",
        STORE_FAULTS,
    ),
    Planted(
        "a fetch is waited for however late it is",
        "workers/transfer/transfer.py",
        "asyncio.wait({moving}, timeout=patience_s)",
        "asyncio.wait({moving})",
        STORE_FAULTS,
    ),
    Planted(
        "a late store is asked again by each request",
        "kvstore/stores/circuit_breaker.py",
        "            self._ring()\n",
        "            pass\n",
        f"{GUARD} {STORE_FAULTS}",
    ),
    Planted(
        "a get reaches a store that is left alone",
        "kvstore/stores/circuit_breaker.py",
        """        if self._breaker.is_open:
            outcomes = [Got""",
        """        if not self._store:
            outcomes = [Got""",
        GUARD,
    ),
    Planted(
        "a question waits although the store was found down",
        "kvstore/stores/circuit_breaker.py",
        "for let_go in self._asking:",
        "for let_go in set(self._asking) & {asyncio.current_task()}:",
        GUARD,
    ),
    Planted(
        "a failure of long ago opens the breaker again",
        "kvstore/stores/circuit_breaker.py",
        "if self.is_open or trips != self.trips:",
        "if self.is_open:",
        GUARD,
    ),
    Planted(
        "a probe that is answered late closes the breaker",
        "kvstore/stores/circuit_breaker.py",
        "got is not Got.UNREACHABLE and loop.time() - started <= self.patience_s(num_bytes)",
        "got is not Got.UNREACHABLE",
        GUARD,
    ),
    Planted(
        "a part of the store answers for one that is frozen",
        "kvstore/stores/circuit_breaker.py",
        "self._known = min(doubtful, key=itemgetter(0), default=self._known)",
        "pass",
        GUARD,
    ),
    Planted(
        "what was moved last is not asked for",
        "kvstore/stores/circuit_breaker.py",
        "            self._known = min(sizes, key=itemgetter(0))\n",
        "",
        GUARD,
    ),
    Planted(
        "probes come at the same pace for ever",
        "kvstore/stores/circuit_breaker.py",
        "self._wait_s = min(2 * wait_s, PROBE_S_MAX)",
        "self._wait_s = wait_s",
        GUARD,
    ),
    Planted(
        "a store that answers probes alone is tried as often as one that works",
        "kvstore/stores/circuit_breaker.py",
        "        self.is_open = False\n\n    def moved",
        "        self.is_open = False\n        self._wait_s = PROBE_S_MIN\n\n    def moved",
        GUARD,
    ),
    Planted(
        "a busy event loop is taken for a late store",
        "kvstore/stores/circuit_breaker.py",
        "if behind_s > BUSY_S:",
        "if behind_s < 0:",
        GUARD,
    ),
    Planted(
        "a slow link is down for ever",
        "kvstore/stores/circuit_breaker.py",
        "            self._rate.add(num_bytes, now_s - max(started, self._moved_last_s))\n",
        "            pass\n",
        GUARD,
    ),
    Planted(
        "a call that nobody waits for is cut off by closing",
        "kvstore/stores/circuit_breaker.py",
        """        if self._asked:
            await asyncio.wait(self._asked)
""",
        "",
        GUARD,
    ),
)
