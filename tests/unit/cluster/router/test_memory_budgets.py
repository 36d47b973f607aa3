"""The router's budgets: never more than a device has, whatever is lost, slow, killed or restarted."""

from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from tidemill.cluster.router.memory_budgets import GATHER_S_MAX, LEND_AFTER_S, PRESSED_S, Budgets
from tidemill.workers.messages import (
    Announcement,
    Heartbeat,
    MemoryUse,
    RequestError,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

MIB = 1 << 20
SHARE = 64 * MIB
FLOOR = 4 * MIB
NAMES = ("decode-0", "decode-1", "prefill-0")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Worker:
    """One that takes what it is allowed when it wants it, and gives back in its own time."""

    name: str
    floor: int = FLOOR
    most: int = 3 * SHARE
    device: str = "here/cpu"
    life: int = 0
    sequence: int = 0
    full: bool = True
    budget: int = FLOOR
    mapped: int = 0
    live: int = 0
    wanted: int = 0
    counters: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def taken(self) -> int:
        """What it has, or may have at any moment."""
        return max(self.budget, self.mapped)

    def beat(self) -> Heartbeat:
        self.sequence += 1
        full, self.full = self.full, False
        return Heartbeat(
            info=self.info(),
            sequence=self.sequence,
            load=WorkerLoad(
                memory=MemoryUse(pages_live=self.live, empty=self.mapped - self.live),
                budget_bytes=self.budget,
                wanted_bytes=self.wanted,
                counters=dict(self.counters),
            ),
            announcement=Announcement(full=full),
        )

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=WorkerId(f"{self.name}.{self.life}"),
            name=self.name,
            role="decode",
            address="",
            pid=1,
            node="here",
            device=self.device,
            memory_bytes=SHARE,
            memory_floor_bytes=self.floor,
            memory_max_bytes=self.most,
            max_model_len=512,
        )

    def told(self, budget: int | None) -> None:
        if budget is not None:
            assert self.floor <= budget <= self.most
            self.budget = budget

    def restart(self) -> None:
        self.life += 1
        self.sequence, self.full = 0, True
        self.budget, self.mapped, self.live = self.floor, 0, 0


def budgets_of(clock: Clock, *expected: str, broker: bool = True) -> Budgets:
    return Budgets(clock, broker=broker, expected=frozenset(expected))


def talk(budgets: Budgets, workers: list[Worker], rounds: int = 12) -> None:
    """Everybody beats, does at once what it is told, and fills it."""
    for _ in range(rounds):
        for worker in workers:
            worker.told(budgets.report(worker.beat()))
            worker.mapped = worker.budget
            worker.live = min(worker.live, worker.mapped)
        assert sum(worker.taken for worker in workers) <= SHARE * len(workers)


@pytest.mark.parametrize("seed", range(50))
def test_a_device_is_never_over_committed(seed: int) -> None:
    """Words are lost, workers are slow, die and start again at their floor, people set budgets, the router
    forgets everything: at each moment all that the workers have or may take is there."""
    rng = Random(seed)
    clock = Clock()
    floors = {name: rng.randrange(1, 8) * MIB for name in NAMES[: rng.choice([1, 2, 3])]}
    workers = [Worker(name, floor=floor, budget=floor) for name, floor in floors.items()]
    names = [worker.name for worker in workers]
    total = SHARE * len(workers)
    budgets = budgets_of(clock, *names)
    for _ in range(400):
        clock.now_s += rng.random() * 0.3
        worker = rng.choice(workers)
        match rng.random():
            case chance if chance < 0.01:
                worker.restart()
            case chance if chance < 0.015:
                budgets = budgets_of(clock, *names)
                for other in workers:
                    other.full = True
            case chance if chance < 0.05:
                _set_by_hand(rng, budgets, worker)
            case chance if chance < 0.15:
                worker.wanted = rng.choice([0, 0, rng.randrange(2 * total)])
            case chance if chance < 0.3:  # it takes, or gives back, or not yet
                worker.mapped = rng.randrange(worker.taken) if worker.taken else 0
                worker.live = min(worker.live, worker.mapped)
            case chance if chance < 0.35:  # the word was sent, and the connection broke before it came
                budgets.report(worker.beat())
                worker.full = True
            case _:
                worker.told(budgets.report(worker.beat()))
        assert sum(member.taken for member in workers) <= total


def _set_by_hand(rng: Random, budgets: Budgets, worker: Worker) -> None:
    with suppress(RequestError):
        budgets.set(worker.name, rng.choice([None, rng.randrange(2 * SHARE)]))


def test_everybody_starts_at_its_floor_and_has_all_after_the_first_words() -> None:
    workers = [Worker(name) for name in NAMES]
    budgets = budgets_of(Clock(), *NAMES)
    talk(budgets, workers, rounds=2)
    assert sum(worker.budget for worker in workers) > 2 * SHARE
    talk(budgets, workers)
    assert [worker.budget for worker in workers] == [SHARE] * 3


def test_memory_follows_demand_within_a_few_beats() -> None:
    first, second = workers = [Worker(name) for name in NAMES[:2]]
    budgets = budgets_of(Clock())
    talk(budgets, workers)
    for wants, lends in ((first, second), (second, first)) * 2:
        wants.wanted, lends.wanted = 4 * SHARE, 0
        talk(budgets, workers, rounds=3)
        assert wants.budget == 2 * SHARE - FLOOR
        assert lends.budget == FLOOR


def test_devices_and_workers_without_memory_stand_apart() -> None:
    here, there, none = Worker("decode-0"), Worker("decode-1", device="there/cpu"), Worker("decode-2", most=0)
    budgets = budgets_of(Clock())
    here.wanted = 4 * SHARE
    for _ in range(5):
        here.told(budgets.report(here.beat()))
        there.told(budgets.report(there.beat()))
        assert budgets.report(none.beat()) is None
    assert (here.budget, there.budget) == (SHARE, SHARE)


def test_nothing_moves_before_all_that_are_expected_were_heard_or_too_late() -> None:
    clock = Clock()
    budgets = budgets_of(clock, *NAMES[:2])
    first, second = Worker(NAMES[0], budget=SHARE, wanted=4 * SHARE), Worker(NAMES[1], budget=SHARE)
    assert budgets.report(first.beat()) is None
    assert budgets.report(first.beat()) is None
    assert budgets.report(second.beat()) == FLOOR
    fresh = budgets_of(clock, *NAMES[:2])
    clock.now_s += GATHER_S_MAX
    assert fresh.report(first.beat()) == SHARE


def test_a_dead_workers_memory_is_lent_and_comes_back() -> None:
    clock = Clock()
    budgets = budgets_of(clock)
    dead, other = workers = [Worker(name) for name in NAMES[:2]]
    talk(budgets, workers)
    other.wanted = 4 * SHARE
    clock.now_s += LEND_AFTER_S
    talk_alone = [budgets.report(other.beat()) for _ in range(3)]
    assert talk_alone == [SHARE] * 3, "it may be frozen"
    clock.now_s += 1.0
    other.told(budgets.report(other.beat()))
    assert other.budget == 2 * SHARE - FLOOR, "its next life starts with its floor"
    dead.restart()
    dead.wanted = 4 * SHARE
    talk(budgets, workers)
    assert (dead.budget, other.budget) == (SHARE, SHARE)


def test_a_worker_that_starts_again_elsewhere_takes_its_share_along() -> None:
    budgets = budgets_of(Clock())
    moved, stays = workers = [Worker(name) for name in NAMES[:2]]
    stays.wanted = 4 * SHARE
    talk(budgets, workers)
    assert stays.budget == 2 * SHARE - FLOOR
    moved.restart()
    moved.device = "there/cpu"
    talk(budgets, workers)
    assert (moved.budget, stays.budget) == (SHARE, SHARE)


def test_a_worker_that_had_no_memory_to_spare_gets_more_for_its_cache() -> None:
    clock = Clock()
    budgets = budgets_of(clock)
    busy, idle = workers = [Worker(name) for name in NAMES[:2]]
    talk(budgets, workers)
    for name in ("evicted_pages_for_resize", "evicted_checkpoints_for_cap", "steps"):
        busy.counters[name] = 5.0
    talk(budgets, workers)
    assert busy.budget == idle.budget
    for _ in range(30):
        clock.now_s += 1.0
        busy.counters["evicted_pages_for_states"] = clock.now_s
        talk(budgets, workers, rounds=1)
    assert idle.budget <= SHARE // 4
    kept = busy.budget
    clock.now_s += PRESSED_S + 1
    talk(budgets, workers)
    assert busy.budget == kept, "nothing moves without a reason"


@pytest.mark.parametrize("broker", [True, False])
def test_a_persons_budget_holds_until_it_is_taken_back(*, broker: bool) -> None:
    budgets = budgets_of(Clock(), broker=broker)
    set_one, other = workers = [Worker(name) for name in NAMES[:2]]
    talk(budgets, workers)
    assert budgets.set_of(set_one.info()) == ("broker" if broker else "share", SHARE)
    budgets.set(set_one.name, 10 * MIB)
    set_one.wanted = 4 * SHARE
    talk(budgets, workers)
    assert budgets.set_of(set_one.info()) == ("operator", 10 * MIB)
    assert set_one.budget == 10 * MIB
    assert other.budget == (2 * SHARE - 10 * MIB if broker else SHARE)
    set_one.restart()
    talk(budgets, workers)
    assert set_one.budget == 10 * MIB, "it survives a restart of the worker"
    budgets.set(set_one.name, None)
    talk(budgets, workers)
    assert set_one.budget == (2 * SHARE - FLOOR if broker else SHARE)


@pytest.mark.parametrize("broker", [True, False])
def test_what_a_person_cannot_have_is_refused_with_the_reason(*, broker: bool) -> None:
    budgets = budgets_of(Clock(), broker=broker)
    talk(budgets, [Worker(name, most=3 * SHARE) for name in NAMES])

    def refused(name: str, budget: int, *words: str) -> None:
        with pytest.raises(RequestError) as caught:
            budgets.set(name, budget)
        assert all(word in str(caught.value) for word in words), caught.value
        assert caught.value.status == (400 if name in NAMES else 404)

    refused("decode-9", SHARE, *NAMES)
    refused("decode-0", FLOOR - 1, f"{FLOOR:,}", "one request of 512 tokens")
    refused("decode-0", 3 * SHARE + 1, "address space", f"{3 * SHARE:,}")
    refused("decode-0", 3 * SHARE, "the other workers")
    budgets.set("decode-0", FLOOR)
    left = 3 * SHARE - FLOOR - (FLOOR if broker else SHARE)
    refused("decode-1", left + 1, f"leaves {left:,}")
    budgets.set("decode-1", left)


def test_nobody_is_known_at_first() -> None:
    with pytest.raises(RequestError, match="none was heard yet"):
        budgets_of(Clock()).set("decode-0", SHARE)
