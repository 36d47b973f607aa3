"""The ledger against the reference ledger, in random traffic of requests that need only pages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kvstore.leases import ROOT, P, a_cache
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import PAGES
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.reference import ReferenceLedger

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
choices = st.integers(0, 99)


class LedgerAgainstReference(RuleBasedStateMachine):
    @initialize(num_extents=st.integers(1, 8))
    def build(self, num_extents: int) -> None:
        self.ledger = Ledger(a_cache(num_extents, hybrid=False, policy="lru"))
        self.num_pages = num_extents * self.ledger.layout.pages_per_extent
        self.reference = ReferenceLedger(self.num_pages, P)
        self.rows: dict[str, tuple[list[int], Lease]] = {}
        self.serial = 0

    @rule(tokens=tokens)
    def start(self, tokens: list[int]) -> None:
        """Open a request that shares what is cached of its prompt, up to its last token."""
        self.serial += 1
        name, keys = f"r{self.serial}", page_keys(ROOT, tokens[:-1], P)
        lease, match = self.ledger.open(name), self.ledger.index.match(keys)
        self.ledger.attach(lease, match, match.restorable_pages)
        self.ledger.index.use(lease.shared_entries)
        assert self.reference.open(name, keys) == match.restorable_pages, "the same prefix hits"
        self.rows[name] = (tokens, lease)
        self._run(name)

    @precondition(lambda self: self.rows)
    @rule(choice=choices, more=tokens)
    def grow(self, choice: int, more: list[int]) -> None:
        name = list(self.rows)[choice % len(self.rows)]
        self.rows[name][0].extend(more)
        self._run(name)

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        self._release(list(self.rows)[choice % len(self.rows)])

    @invariant()
    def both_hold_the_same(self) -> None:
        self.ledger.check()
        usage = self.ledger.usage()
        assert self.reference.num_free == self.num_pages - usage.pinned[PAGES] - usage.cached[PAGES]
        assert {entry.key: entry.pins for entry in self.ledger.index} == {
            key: page.refs for key, page in self.reference.cached.items()
        }
        for name, (_, lease) in self.rows.items():
            table = self.reference.tables[name]
            shared = [page.key for page in table if page.key is not None]
            assert [entry.key for entry in lease.shared_entries] == shared
            assert len(table) == len(lease.pages)

    def _run(self, name: str) -> None:
        """Compute all tokens of a request, or end it when memory is short."""
        known, lease = self.rows[name]
        refused: list[bool] = []
        for ledger, request in ((self.ledger, lease), (self.reference, name)):
            try:
                ledger.reserve(request, len(known))  # pyrefly: ignore[bad-argument-type]  each has its own
            except OutOfMemory:
                refused.append(True)
            else:
                refused.append(False)
        assert refused[0] == refused[1]
        if refused[0]:
            self._release(name)
            return
        keys = page_keys(ROOT, known, P)
        self.ledger.launch(lease, len(known))
        self.ledger.commit(lease, len(known), keys)
        self.reference.commit(name, len(known), keys)

    def _release(self, name: str) -> None:
        del self.rows[name]
        self.ledger.release(name)
        self.reference.release(name)


TestLedgerAgainstReference = LedgerAgainstReference.TestCase
TestLedgerAgainstReference.settings = settings(
    deadline=None, derandomize=True, max_examples=200, stateful_step_count=40
)
