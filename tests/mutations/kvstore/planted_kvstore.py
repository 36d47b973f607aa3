"""Bugs to plant in kvstore/."""

from tests.mutations.kvstore.planted_ledger import LEASES, LEDGER, LEDGER_BUGS
from tests.mutations.planted import ARENA, INDEX, KEYS, UNIT, Planted

POLICIES = f"{UNIT}/kvstore/memory/test_eviction_policies.py"
EVICTION = f"{UNIT}/kvstore/memory/test_eviction.py"

KVSTORE = (
    Planted(
        "a page's key forgets what came before it",
        "kvstore/keys.py",
        "return _digest(parent, pack",
        'return _digest(b"", pack',
        KEYS,
    ),
    Planted(
        "two extents hand out the same ids",
        "kvstore/memory/arena.py",
        "        first = extent * self.objects_per_extent\n        self._free",
        "        first = extent\n        self._free",
        ARENA,
    ),
    Planted(
        "an empty extent keeps its class",
        "kvstore/memory/arena.py",
        "if before > 1:",
        "if before > 0:",
        ARENA,
    ),
    Planted(
        "the emptiest extent is filled first",
        "kvstore/memory/arena.py",
        "self._fullest = max(self._fullest, taken)",
        "self._fullest = (min if self._buckets[self._fullest] else max)(self._fullest, taken)",
        ARENA,
    ),
    Planted(
        "a smaller budget leaves empty extents mapped",
        "kvstore/memory/arena.py",
        "while self._spare and self.excess:",
        "while False:",
        ARENA,
    ),
    Planted(
        "the budget is exceeded by an extent",
        "kvstore/memory/arena.py",
        "if self._mapped >= self.budget_extents:",
        "if self._mapped > self.budget_extents:",
        ARENA,
    ),
    Planted(
        "an extent that the system refuses is lost",
        "kvstore/memory/arena.py",
        """        extent = self._unmapped[-1]
        self._backing.map(extent * self._extent_bytes, self._extent_bytes)
        return self._unmapped.pop()
""",
        """        extent = self._unmapped.pop()
        self._backing.map(extent * self._extent_bytes, self._extent_bytes)
        return extent
""",
        ARENA,
    ),
    Planted(
        "idle extents stay mapped for ever",
        "kvstore/memory/arena.py",
        "if self.excess or len(self._spare) > SPARE_EXTENTS_MAX:",
        "if self.excess:",
        ARENA,
    ),
    Planted(
        "what is kept counts as held",
        "kvstore/memory/arena.py",
        "        self._count_pinned(kept // self.objects_per_extent, -1)\n",
        "",
        ARENA,
    ),
    Planted(
        "a token is not computed over itself",
        "kvstore/memory/recompute_cost.py",
        "(end * (end + 1) - start * (start + 1)) / 2",
        "(end * (end - 1) - start * (start - 1)) / 2",
        INDEX,
    ),
    Planted(
        "a match of a hybrid resumes without a checkpoint",
        "kvstore/memory/prefix_index.py",
        """            if self.is_restorable(entry):
                restorable = len(path)
""",
        "            restorable = len(path)\n",
        INDEX,
    ),
    Planted(
        "parents of evicted leaves stay for ever",
        "kvstore/memory/prefix_index.py",
        "            self._offer(entry.parent)\n",
        "",
        INDEX,
    ),
    Planted(
        "a checkpoint that is being read is evicted",
        "kvstore/memory/prefix_index.py",
        "            if entry is not None and entry.checkpoint is not None and not entry.checkpoint_pins:",
        "            if entry is not None and entry.checkpoint is not None:",
        INDEX,
    ),
    Planted(
        "an entry is evicted under its children",
        "kvstore/memory/prefix_index.py",
        "return not (entry.children or entry.pins",
        "return not (entry.pins",
        INDEX,
    ),
    Planted(
        "the last writer of a page wins",
        "kvstore/memory/prefix_index.py",
        """            entry.pins += 1
            return entry, False
""",
        """            entry.pins += 1
            entry.page = page
            return entry, False
""",
        f"{INDEX} {LEASES}",
    ),
    Planted(
        "a lost checkpoint is not announced",
        "kvstore/memory/prefix_index.py",
        "        self._changes.remove(entry.key)\n        self._offer(entry)\n",
        "        self._offer(entry)\n",
        INDEX,
    ),
    Planted(
        "what came back is announced as gone",
        "kvstore/memory/prefix_index.py",
        "        self.removed.discard(key)\n",
        "",
        INDEX,
    ),
    Planted(
        "leaves with a checkpoint are evicted first",
        "kvstore/memory/prefix_index.py",
        "return (True, entry.score) if self.is_restorable(entry) else (False,",
        "return (False, entry.score) if self.is_restorable(entry) else (True,",
        f"{POLICIES} {INDEX}",
    ),
    Planted(
        "records of the past pile up",
        "kvstore/memory/prefix_index.py",
        "+ STALE_RECORDS_MAX:",
        "+ (1 << 40):",
        INDEX,
    ),
    Planted(
        "what was used long ago is worth what it was then",
        "kvstore/memory/prefix_index.py",
        "value = self._clock + entry.uses",
        "value = 0.0 + entry.uses",
        f"{POLICIES} {INDEX}",
    ),
    Planted(
        "the credit ignores the clock",
        "kvstore/memory/prefix_index.py",
        "max(0.0, entry.score[0] - self._clock)",
        "max(0.0, entry.score[0])",
        f"{POLICIES} {INDEX}",
    ),
    Planted(
        "a checkpoint saves all that lies before it",
        "kvstore/memory/prefix_index.py",
        "self._appraise(entry, above_pages, segment_bytes",
        "self._appraise(entry, 0, segment_bytes",
        f"{POLICIES} {INDEX}",
    ),
    Planted(
        "half an extent of pages goes although the rest is held",
        "kvstore/memory/eviction.py",
        "        if extent in arena.pages.reclaimable:\n",
        "        if extent >= 0:\n",
        EVICTION,
    ),
    Planted(
        "half an extent of states goes although the rest is held",
        "kvstore/memory/eviction.py",
        "if state is not None and arena.states.extent_of(state) in arena.states.reclaimable:",
        "if state is not None:",
        EVICTION,
    ),
    Planted(
        "what hangs below an evicted page stays",
        "kvstore/memory/eviction.py",
        "            stack += entry.children\n",
        "",
        EVICTION,
    ),
    Planted(
        "a subtree goes root first",
        "kvstore/memory/eviction.py",
        "key=lambda entry: -entry.depth_pages",
        "key=lambda entry: entry.depth_pages",
        EVICTION,
    ),
    Planted(
        "pages never take what states keep while there are leaves",
        "kvstore/memory/eviction.py",
        "key=_price) if price else direct",
        "key=_price) if price < 0 else direct",
        EVICTION,
    ),
    Planted(
        "an entry that is shared again counts as kept",
        "kvstore/memory/cache.py",
        "if not taken_over and entry.pins == 1:",
        "if not taken_over and entry.pins == 0:",
        LEDGER,
    ),
    Planted(
        "the checkpoint of an evicted page leaks",
        "kvstore/memory/cache.py",
        "            self.arena.states.free(checkpoint.state)\n",
        "            pass\n",
        f"{EVICTION} {LEASES}",
    ),
    Planted(
        "a smaller budget evicts nothing",
        "kvstore/memory/cache.py",
        "        while self.arena.excess:\n",
        "        while self.arena.excess and False:\n",
        LEASES,
    ),
    *LEDGER_BUGS,
)
