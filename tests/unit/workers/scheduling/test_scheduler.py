"""The rows of the next step: unread tokens, unconfirmed guesses, and memory of their own."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.support.kvstore.leases import P, a_ledger
from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.kvstore.layout import PAGES, STATES, StateId
from tidemill.kvstore.memory.demand import FailAllocation, never
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Row
from tidemill.workers.messages import Request
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.scheduling.scheduler import Batch, Scheduler
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.scheduling.sequences import Sequences

ROOT = Namespace(model="m", layout="l").root()
FAR = 1000


class Always:
    """Guesses the same, as often as it is asked."""

    def __init__(self, *guesses: int) -> None:
        self._guesses = guesses

    def propose(self, tokens: Iterable[int], most: int) -> list[int]:
        assert list(tokens)
        return list(self._guesses[:most])

    def accept_proposals(self, guesses: Iterable[int], num_tokens: int) -> None:
        """Ignore guesses of the runner."""


class Desk:
    """A schedule over sequences that have memory; the test lands the steps."""

    def __init__(
        self,
        *,
        num_extents: int = 60,
        hybrid: bool = True,
        refuses: FailAllocation = never,
        drafts_max: int = 0,
        tokens_max: int = 40,
        strategy: CheckpointStrategy = "lazy",
    ) -> None:
        self.ledger: Ledger = a_ledger(num_extents, hybrid=hybrid, fail_allocation=refuses)
        self.sequences = Sequences()
        self.running = self.sequences.running
        self.preempted: list[str] = []
        limits = EngineLimits(
            budget=Budget(tokens_max=tokens_max, rows_max=8, page_tokens=P),
            capacity_tokens=FAR,
            checkpoint_strategy=strategy,
            drafts_max=drafts_max,
        )
        self.schedule = Scheduler(self.ledger, limits, self.sequences, self._preempt)

    def arrives(
        self, name: str, tokens: tuple[int, ...], *, guesses: tuple[int, ...] = (), new_tokens: int = 20
    ) -> Sequence:
        request = Request(request_id=name, tokens=tokens, max_new_tokens=new_tokens)
        sequence = Sequence(
            id=name,
            seniority=(0.0, len(self.running)),
            request=request,
            root=ROOT,
            page_tokens=P,
            produces=False,
            tokens=list(tokens),
            target=len(tokens),
            sampling_state=SamplingState(request),
            drafter=Always(*guesses) if guesses else None,
            keys=page_keys(ROOT, tokens, P),
        )
        sequence.lease = self.ledger.open(name)
        self.ledger.reserve(sequence.lease, len(tokens))
        self.running[name] = sequence
        return sequence

    def launch(self, *, in_flight: bool = False) -> Batch:
        batch = self.schedule.next_step(in_flight=in_flight)
        self.ledger.check()
        return batch

    def land(self, batch: Batch, *drawn: tuple[int, ...]) -> None:
        """Land a step with these draws; of guesses those count that are right."""
        for row, tokens in zip(batch.rows, drawn, strict=True):
            end = row.flight.end
            if row.row.sampling_state is not None:
                count, _ = row.sequence.draw(tokens)
                end += count - 1 - row.row.drafts
            self.ledger.commit(row.lease, end, row.sequence.keys)
            self.ledger.check()
        self.schedule.landed(batch, 0.01)

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        sequence.lease = None
        self.ledger.release(sequence.id)
        self.preempted.append(sequence.id)


def tokens_of(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {row.row.sequence_id: row.row.tokens for row in batch.rows}


def slots(row: Row) -> list[StateId]:
    return [state for _, state in row.writes]


def test_no_token_is_run_beyond_the_last_one_of_the_answer() -> None:
    desk = Desk()
    desk.arrives("a", (1, 2, 3), new_tokens=2)
    first = desk.launch()
    second = desk.launch(in_flight=True)
    assert tokens_of(second) == {"a": (PENDING,)}
    desk.land(first, (7,))
    assert desk.launch(in_flight=True).rows == [], "the second step draws the last one"


def test_row_with_guesses_is_alone_until_they_have_landed() -> None:
    desk = Desk(drafts_max=4, strategy="none")
    one = desk.arrives("a", (1, 2, 3), guesses=(8, 9, 10, 11, 12))
    prompt = desk.launch()
    first = desk.launch(in_flight=True)
    assert tokens_of(first) == {"a": (PENDING,)}, "nothing is known yet to look up"
    desk.land(prompt, (6,))
    assert desk.launch(in_flight=True).rows == [], "with its next token known it has guesses"
    desk.land(first, (7,))
    second = desk.launch()
    assert tokens_of(second) == {"a": (7, 8, 9, 10, 11)}
    (row,) = (planned.row for planned in second.rows)
    assert (row.start, row.drafts, len(row.writes), len(set(slots(row)))) == (4, 4, 5, 5)
    assert row.read not in slots(row), "a wrong guess must not cost the state before it"
    assert desk.launch(in_flight=True).rows == [], "what comes next is not known"
    desk.land(second, (8, 9, 5))
    assert one.tokens == [1, 2, 3, 6, 7, 8, 9, 5]
    assert one.computed == 7
    third = desk.launch()
    assert tokens_of(third) == {"a": (5, 8, 9, 10, 11)}
    assert third.rows[0].row.read == row.writes[2].state, "the state after the last right guess"


@pytest.mark.parametrize(("strategy", "most"), [("none", 4), ("lazy", 1), ("double", 1)])
def test_guesses_stop_where_a_checkpoint_is_wanted(strategy: CheckpointStrategy, most: int) -> None:
    """The state at a boundary must be that of the last token of a row."""
    desk = Desk(drafts_max=4, strategy=strategy)
    desk.arrives("a", (1, 2), guesses=(8, 9, 10, 11))
    desk.land(desk.launch(), (7,))
    (one,) = desk.launch().rows
    assert one.row.drafts == most
    attention = Desk(drafts_max=4, strategy=strategy, hybrid=False)
    attention.arrives("a", (1, 2), guesses=(8, 9, 10, 11))
    attention.land(attention.launch(), (7,))
    assert attention.launch().rows[0].row.drafts == 4, "no states, no such place"


@pytest.mark.parametrize("refused", [STATES, PAGES])
def test_without_memory_for_guesses_it_runs_without_them(refused: str) -> None:
    asked = Counter[str]()
    strict = False

    def refuses(site: str) -> bool:
        asked[site] += 1
        return strict and site == refused

    desk = Desk(drafts_max=4, strategy="none", refuses=refuses)
    desk.arrives("a", (1, 2, 3), guesses=(8, 9, 10, 11))
    desk.land(desk.launch(), (7,))
    strict = True
    assert tokens_of(desk.launch()) == {"a": (7,)}
    assert desk.preempted == []
    assert asked[refused] > 0


def test_no_request_loses_memory_while_a_step_is_in_flight() -> None:
    """The next step waits instead; when nothing is in flight the youngest gives way."""
    strict = False
    desk = Desk(hybrid=False, refuses=lambda site: strict and site == PAGES and not desk.preempted)
    desk.arrives("old", (1, 2))
    desk.arrives("young", (3, 4))
    first = desk.launch()
    strict = True
    assert desk.launch(in_flight=True).rows == []
    assert desk.preempted == []
    desk.land(first, (7,), (8,))
    assert tokens_of(desk.launch()) == {"old": (7,)}
    assert desk.preempted == ["young"]


def test_suspect_runs_alone_and_with_nothing_in_flight() -> None:
    desk = Desk()
    for name in "abc":
        desk.arrives(name, (1, 2, 3))
    desk.running["b"].isolation.until = 4
    desk.running["c"].isolation.until = 1
    assert desk.launch(in_flight=True).rows == []
    first = desk.launch()
    assert tokens_of(first) == {"b": (1, 2, 3)}
    assert desk.launch(in_flight=True).rows == []
    desk.land(first, (7,))
    second = desk.launch()
    assert tokens_of(second) == {"b": (7,)}
    desk.land(second, (8,))
    third = desk.launch()
    assert tokens_of(third).keys() == {"a", "b"}, "it is past that place: the others go on"
    assert desk.launch(in_flight=True).rows == []
    desk.land(third, (5,), (9,))
    fourth = desk.launch()
    assert tokens_of(fourth) == {"c": (1, 2, 3)}, "now the other suspect"
    desk.land(fourth, (9,))
    assert tokens_of(desk.launch()).keys() >= {"a", "b", "c"}
