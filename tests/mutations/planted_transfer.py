"""Bugs to plant in what moves pages and checkpoints, and in how they are cut into shards."""

from tests.mutations.planted import KEYS, UNIT, Planted

TRANSFER = f"{UNIT}/workers/test_transfer.py"
SHARDS = f"{UNIT}/kvstore/test_shards.py"

TRANSFER_BUGS = (
    Planted(
        "a fetched prompt runs without its state",
        "workers/transfer.py",
        "wanted.append(Moved(Kind.CHECKPOINT, keys[num_pages - 1], lease.fetch_slot))",
        "pass",
        TRANSFER,
    ),
    Planted(
        "a damaged object is taken for good",
        "workers/transfer.py",
        "outcome is Got.HIT",
        "outcome is not Got.MISS",
        TRANSFER,
    ),
    Planted(
        "the checkpoint is published before its pages",
        "workers/transfer.py",
        "self._put(pages + checkpoint)",
        "self._put(checkpoint + pages)",
        TRANSFER,
    ),
    Planted(
        "the checkpoint is published before the pages of another rank",
        "workers/transfer.py",
        "self._put(pages) and await self._put(checkpoint)",
        "self._put([*pages, *checkpoint])",
        TRANSFER,
    ),
    Planted(
        "a fetch fills the wrong pages",
        "workers/transfer.py",
        "lease.own[index - first]",
        "lease.own[index - num_pages]",
        TRANSFER,
    ),
    Planted(
        "what is good on one rank is good on all",
        "workers/transfer.py",
        "return min(answer.result()",
        "return max(answer.result()",
        TRANSFER,
    ),
    Planted(
        "the store is asked for the first shard alone",
        "workers/transfer.py",
        "for shard in range(counts[kind])",
        "for shard in range(1)",
        TRANSFER,
    ),
    Planted(
        "a cancelled transfer goes on in leased memory",
        "workers/transfer.py",
        "await finish(asyncio.gather(*answers, return_exceptions=True))",
        "await asyncio.gather(*answers)",
        TRANSFER,
    ),
    Planted(
        "the states of a rank lie where its pages do",
        "workers/transfer.py",
        "offset = self._layout.state_offset(StateId(moved.place))",
        "offset = self._layout.page_offset(PageId(moved.place))",
        TRANSFER,
    ),
    Planted(
        "a copy of a page is published by every rank that has it",
        "kvstore/shards.py",
        "publishes_pages=rank % copies == 0",
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
        "lcm(*(min(size, kv_heads) for size in sizes))",
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
        "kvstore/seal.py",
        "        key.shard,\n",
        "        0,\n",
        f"{UNIT}/kvstore/test_seal.py",
    ),
    Planted(
        "all shards of an object have one name",
        "kvstore/keys.py",
        "{self.shard:04x}",
        "0000",
        KEYS,
    ),
)
