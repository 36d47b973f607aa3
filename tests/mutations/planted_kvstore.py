"""Bugs to plant in kvstore/."""

from tests.mutations.planted import ARENA, ENGINE, INDEX, KEYS, LEDGER, SIM, Planted

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
        "kvstore/arena.py",
        "first = extent * self.places",
        "first = extent",
        ARENA,
    ),
    Planted(
        "an empty extent keeps its class",
        "kvstore/arena.py",
        "if before > 1:",
        "if before > 0:",
        ARENA,
    ),
    Planted(
        "the emptiest extent is filled first",
        "kvstore/arena.py",
        "max(self._fullest, count)",
        "min(self._fullest, count) if self._buckets[self._fullest] else max(self._fullest, count)",
        ARENA,
    ),
    Planted(
        "a match of a hybrid resumes without a checkpoint",
        "kvstore/index.py",
        """            if self._is_restorable(entry):
                restorable = len(path)
""",
        """            restorable = len(path)
""",
        f"{INDEX} {SIM}",
    ),
    Planted(
        "parents of evicted leaves stay for ever",
        "kvstore/index.py",
        "                self._offer(entry.parent)\n",
        "",
        INDEX,
    ),
    Planted(
        "a checkpoint that is being read is evicted",
        "kvstore/index.py",
        "if entry is None or entry.checkpoint is None or entry.checkpoint_pins:",
        "if entry is None or entry.checkpoint is None:",
        INDEX,
    ),
    Planted(
        "an entry is evicted under its children",
        "kvstore/index.py",
        "return not (entry.children or entry.pins",
        "return not (entry.pins",
        INDEX,
    ),
    Planted(
        "the last writer of a page wins",
        "kvstore/index.py",
        """            entry.pins += 1
            return entry, False
""",
        """            entry.pins += 1
            entry.page = page
            return entry, False
""",
        f"{INDEX} {LEDGER}",
    ),
    Planted(
        "a lost checkpoint is not announced",
        "kvstore/index.py",
        "        self._changes.remove(entry.key)\n",
        "",
        INDEX,
    ),
    Planted(
        "what came back is announced as gone",
        "kvstore/index.py",
        "        self.removed.discard(key)\n",
        "",
        INDEX,
    ),
    Planted(
        "leaves with a checkpoint are evicted first",
        "kvstore/index.py",
        "return self._is_restorable(entry), entry.last_use",
        "return not self._is_restorable(entry), entry.last_use",
        INDEX,
    ),
    Planted("records of the past pile up", "kvstore/index.py", "+ STALE_RECORDS_MAX:", "+ (1 << 40):", INDEX),
    Planted(
        "shared pages are not pinned",
        "kvstore/ledger.py",
        "            self.index.pin(entry)\n",
        "",
        LEDGER,
    ),
    Planted(
        "a checkpoint stays pinned after it was read",
        "kvstore/ledger.py",
        """        lease.committed = num_tokens
        if lease.source is not None:
            self.index.unpin_checkpoint(lease.source)
""",
        """        lease.committed = num_tokens
        if lease.source is not None:
""",
        LEDGER,
    ),
    Planted(
        "the page that nobody keeps leaks",
        "kvstore/ledger.py",
        "            if not taken_over:\n",
        "            if not taken_over and False:\n",
        LEDGER,
    ),
    Planted(
        "the next step writes into the checkpoint",
        "kvstore/ledger.py",
        "            lease.state = fresh\n",
        "",
        LEDGER,
    ),
    Planted(
        "a checkpoint that finds no memory breaks the step",
        "kvstore/ledger.py",
        """                self.counters["checkpoints_skipped"] += 1
                return
""",
        """                self.counters["checkpoints_skipped"] += 1
                raise
""",
        LEDGER,
    ),
    Planted(
        "a rolled checkpoint is dropped while somebody reads it",
        "kvstore/ledger.py",
        "earlier.checkpoint is not None and not earlier.checkpoint_pins",
        "earlier.checkpoint is not None",
        LEDGER,
    ),
    Planted(
        "rolling keeps every checkpoint",
        "kvstore/ledger.py",
        "earlier, lease.rolling = lease.rolling, entry",
        "earlier, lease.rolling = None, entry",
        f"{LEDGER} {ENGINE}",
    ),
    Planted(
        "a released path stays pinned",
        "kvstore/ledger.py",
        "            self.index.unpin(lease.entries.pop())\n",
        "            lease.entries.pop()\n",
        LEDGER,
    ),
    Planted(
        "a refused reservation keeps a page",
        "kvstore/ledger.py",
        "while len(lease.own) > before:",
        "while len(lease.own) > before + 1:",
        LEDGER,
    ),
    Planted(
        "a refused reservation keeps its state",
        "kvstore/ledger.py",
        "if lease.state is not None and state is None:",
        "if lease.state is not None and state is None and False:",
        LEDGER,
    ),
    Planted(
        "a reservation fails although its evictions made enough free",
        "kvstore/ledger.py",
        "            self._grow(lease, num_tokens)  #",
        "            raise  #",
        LEDGER,
    ),
    Planted(
        "an empty sequence starts from an old state",
        "kvstore/ledger.py",
        "return self.state if self.committed else None",
        "return self.state",
        f"{LEDGER} {SIM}",
    ),
    Planted(
        "a page is published before it is full",
        "kvstore/ledger.py",
        "while (len(lease.entries) + 1) * size <= num_tokens:",
        "while len(lease.entries) * size < num_tokens:",
        LEDGER,
    ),
)
