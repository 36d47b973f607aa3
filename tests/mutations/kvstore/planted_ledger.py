"""Bugs to plant in the ledger."""

from tests.mutations.planted import UNIT, Planted

LEASES = f"{UNIT}/kvstore/memory/test_lease.py"
LEDGER = f"{UNIT}/kvstore/memory/test_ledger.py"
MATRIX = f"{UNIT}/kvstore/memory/test_lease_matrix.py"
SITES = f"{UNIT}/kvstore/memory/test_allocation_sites.py"

LEDGER_BUGS = (
    Planted(
        "shared pages are not pinned",
        "kvstore/memory/ledger.py",
        "            self._cache.pin(entry)\n",
        "            self.index.pin(entry)\n",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "a checkpoint is let go when the step that reads it goes off",
        "kvstore/memory/ledger.py",
        "                flight.reads = flight.source.checkpoint.state\n",
        """                flight.reads = flight.source.checkpoint.state
                self._cache.unpin_checkpoint(flight.source)
                flight.source = None
""",
        LEDGER,
    ),
    Planted(
        "a checkpoint stays pinned after it was read",
        "kvstore/memory/ledger.py",
        """        if flight.source is not None:
            self._cache.unpin_checkpoint(flight.source)
""",
        "",
        LEASES,
    ),
    Planted(
        "the slots of a void step are free at once",
        "kvstore/memory/ledger.py",
        """        lease.flights[-1].deferred_free = tuple(slots)
        return []
""",
        "        return slots\n",
        LEDGER,
    ),
    Planted(
        "a page that a step in flight reads is free at once",
        "kvstore/memory/ledger.py",
        "                if lease.flights:\n                    lease.flights[-1].deferred_free_pages",
        "                if not lease.committed:\n                    lease.flights[-1].deferred_free_pages",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "a void step counts",
        "kvstore/memory/ledger.py",
        "if not flight.void and not lease.ended:",
        "if not lease.ended:",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "a step that lands after the end counts",
        "kvstore/memory/ledger.py",
        "if not flight.void and not lease.ended:",
        "if not flight.void:",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "rejected drafts keep their slots",
        "kvstore/memory/ledger.py",
        """            for slot in rejected:
                self._checkpoints.return_slot(lease, slot)
""",
        "",
        LEASES,
    ),
    Planted(
        "what is released in flight is free at once",
        "kvstore/memory/ledger.py",
        "            self._landing.append(lease)\n",
        """            self._landing.append(lease)
            self._give_pages(lease, 0)
""",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "memory for a request that has ended",
        "kvstore/memory/ledger.py",
        '        assert not lease.ended, "memory for a request that has ended"\n',
        "",
        MATRIX,
    ),
    Planted(
        "a step in flight keeps the page table of another's page",
        "kvstore/memory/ledger.py",
        """                lease.count_pages()
                if""",
        """                if""",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "the page that nobody keeps leaks",
        "kvstore/memory/ledger.py",
        """                else:
                    self._cache.free_page(page)
""",
        "",
        f"{LEASES} {LEDGER}",
    ),
    Planted(
        "a page is published before it is full",
        "kvstore/memory/ledger.py",
        "while (len(lease.shared_entries) + 1) * self.layout.page_tokens <= num_tokens:",
        "while len(lease.shared_entries) * self.layout.page_tokens < num_tokens:",
        LEASES,
    ),
    Planted(
        "the next step writes into the checkpoint",
        "kvstore/memory/checkpoints.py",
        "state = lease.states.pop(lease.committed, None)",
        "state = lease.states.get(lease.committed)",
        LEASES,
    ),
    Planted(
        "the state that is wanted is overwritten in flight",
        "kvstore/memory/ledger.py",
        "if lease.writes_in_place(drafts) and not (keep and self._checkpoints.borrow(lease)):",
        "if lease.writes_in_place(drafts):",
        f"{SITES} {MATRIX}",
    ),
    Planted(
        "a rolled checkpoint is dropped while somebody reads it",
        "kvstore/memory/checkpoints.py",
        "earlier is None or earlier.checkpoint is None or earlier.checkpoint_pins:",
        "earlier is None or earlier.checkpoint is None:",
        LEASES,
    ),
    Planted(
        "rolling keeps every checkpoint",
        "kvstore/memory/checkpoints.py",
        "        for slot in self._drop_rolling(lease):\n",
        "        for slot in self._drop_rolling(lease) if lease.ended else ():\n",
        LEASES,
    ),
    Planted(
        "who finds no second slot takes that of another",
        "kvstore/memory/checkpoints.py",
        "if not lease.spare_slots and not self._cache.state_is_free():",
        "if lease.ended:",
        LEASES,
    ),
    Planted(
        "a skipped checkpoint costs another",
        "kvstore/memory/checkpoints.py",
        """        if kept:
            self._thin(lease)
""",
        "        self._thin(lease)\n",
        LEASES,
    ),
    Planted(
        "checkpoints go where paths part",
        "kvstore/memory/checkpoints.py",
        "(len(one.children) > 1, one.score)",
        "(len(one.children) < 2, one.score)",
        LEASES,
    ),
    Planted(
        "a path keeps one checkpoint more than it may",
        "kvstore/memory/checkpoints.py",
        "len(above) + 1 - self._per_path",
        "len(above) - self._per_path",
        LEASES,
    ),
    Planted(
        "a checkpoint that another request reads is overwritten",
        "kvstore/memory/ledger.py",
        "if source is not None and source.checkpoint_pins == 1 and self.layout.has_states:",
        "if source is not None and self.layout.has_states:",
        LEASES,
    ),
    Planted(
        "a released path stays pinned",
        "kvstore/memory/ledger.py",
        "            self._cache.unpin(lease.shared_entries.pop())\n",
        "            lease.shared_entries.pop()\n",
        LEASES,
    ),
    Planted(
        "a refused reservation keeps a page",
        "kvstore/memory/ledger.py",
        "            self._free_pages(lease, num_own)\n",
        "            self._free_pages(lease, num_own + 1)\n",
        SITES,
    ),
    Planted(
        "a refused reservation keeps its state",
        "kvstore/memory/ledger.py",
        "while len(lease.spare_slots) > num_spare:",
        "while len(lease.spare_slots) > num_spare + 1:",
        SITES,
    ),
    Planted(
        "a checkpoint that finds no memory ends the step",
        "kvstore/memory/checkpoints.py",
        "            with suppress(OutOfMemory):\n",
        "            with suppress(ValueError):\n",
        LEASES,
    ),
    Planted(
        "the second slot of double is not reserved",
        "kvstore/memory/lease.py",
        "        sites += [AllocationSite.SPARE_STATE] * self.spare_slots_min\n",
        "",
        f"{SITES} {MATRIX}",
    ),
)
