"""What people tell workers, who was asked of what, and how long a life waits."""

from dataclasses import dataclass, replace

import pytest

from tidemill.cluster.router.quarantine import CONTENTS_MAX, QUARANTINE_S, Quarantine
from tidemill.cluster.router.router import SILENCE_S_MAX, Router
from tidemill.cluster.supervisor.restart_backoff import SOON_S, WAIT_S_MAX, Backoff
from tidemill.cluster.worker.assignment import Assignment
from tidemill.workers.messages import (
    Ack,
    Announcement,
    Heartbeat,
    Poisonous,
    RequestError,
    Role,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def info(name: str, role: Role, life: int = 1) -> WorkerInfo:
    return WorkerInfo(
        worker=WorkerId(f"{name}.{life}"), name=name, role=role, address=f"at:{name}", pid=1, node="n"
    )


@dataclass
class Worker:
    """Beats, and does as it is told."""

    router: Router
    info: WorkerInfo
    takes: tuple[bool, bool] = (True, True)

    def __post_init__(self) -> None:
        self.duties = Assignment(self, self.info)
        self.sequence = 0

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self.takes = (produces, generates)

    def beat(self) -> Ack:
        self.sequence += 1
        ack = self.router.heartbeat(
            Heartbeat(
                info=self.duties.info,
                sequence=self.sequence,
                load=WorkerLoad(),
                announcement=Announcement(full=self.sequence == 1),
                draining=self.duties.draining,
            )
        )
        self.duties.apply(ack)
        return ack


def fleet(router: Router, *roles: Role) -> list[Worker]:
    workers = [Worker(router, info(f"{role}-{index}", role)) for index, role in enumerate(roles)]
    for worker in workers:
        worker.beat()
    return workers


def states(router: Router) -> dict[str, str]:
    return {worker.info.name: worker.state for worker in router.status().workers}


def test_a_drain_is_told_until_it_is_undone() -> None:
    router = Router(Clock())
    first, second = fleet(router, "decode", "decode")
    router.drain("decode-0", drain=True, force=False)
    assert first.beat().drain
    assert first.takes == (False, False)
    assert states(router) == {"decode-0": "draining", "decode-1": "ready"}
    assert not second.beat().drain
    assert first.beat().drain
    router.drain("decode-0", drain=False, force=False)
    first.beat()
    first.beat()
    assert states(router)["decode-0"] == "ready"
    assert first.takes == (False, True), "as its role is"


def test_the_last_of_its_kind_is_drained_by_force_alone() -> None:
    router = Router(Clock())
    fleet(router, "prefill", "decode", "mixed")
    with pytest.raises(RequestError, match="the only worker that takes prompts") as refused:
        router.drain("prefill-0", drain=True, force=False)
    assert refused.value.status == 409
    router.drain("decode-1", drain=True, force=False)
    with pytest.raises(RequestError, match="the only worker that takes streams"):
        router.drain("mixed-2", drain=True, force=False)
    with pytest.raises(RequestError, match="streams"):
        router.set_role("mixed-2", "prefill")
    router.drain("mixed-2", drain=True, force=True)
    with pytest.raises(
        RequestError, match="there is no worker nobody: there is decode-1, mixed-2, prefill-0"
    ):
        router.drain("nobody", drain=True, force=False)


def test_a_router_that_begins_anew_leaves_drains_as_they_are() -> None:
    router = Router(Clock())
    first, _ = fleet(router, "decode", "decode")
    router.drain("decode-0", drain=True, force=False)
    first.beat()
    first.router = Router(Clock())
    assert first.beat().drain
    assert first.takes == (False, False)
    first.router.drain("decode-0", drain=False, force=False)
    first.beat()
    assert first.takes == (False, True), "as its role is"


def test_the_next_life_takes_work_in_the_same_role() -> None:
    router = Router(Clock())
    fleet(router, "decode", "decode")
    router.drain("decode-0", drain=True, force=False)
    router.set_role("decode-0", "mixed")
    again = Worker(router, info("decode-0", "decode", 2))
    ack = again.beat()
    assert (ack.drain, ack.role) == (False, "mixed")


def test_a_role_is_had_from_the_next_beat_on() -> None:
    router = Router(Clock())
    prefill, decode, _ = fleet(router, "prefill", "decode", "decode")
    router.set_role("decode-1", "prefill")
    decode.beat()
    assert decode.takes == (True, False)
    decode.beat()
    assert {worker.info.name: worker.info.role for worker in router.status().workers}["decode-1"] == "prefill"
    router.set_role("prefill-0", "decode")
    prefill.beat()
    assert prefill.takes == (False, True)
    router.set_role("prefill-0", "mixed")
    prefill.beat()
    assert prefill.takes == (True, True)


def test_who_leaves_takes_nothing_whatever_the_router_says() -> None:
    router = Router(Clock())
    first, _ = fleet(router, "decode", "decode")
    first.duties.leave()
    assert first.takes == (False, False)
    first.beat()
    assert states(router)["decode-0"] == "draining"
    router.drain("decode-0", drain=True, force=False)
    first.beat()
    router.drain("decode-0", drain=False, force=False)
    router.set_role("decode-0", "mixed")
    first.beat()
    assert first.takes == (False, False)


def test_who_is_out_is_known_also_by_a_router_that_never_heard_it() -> None:
    clock = Clock()
    router = Router(clock)
    first, second = fleet(router, "decode", "decode")
    lives = [first.info.worker, second.info.worker, WorkerId("frozen.1")]
    assert router.silent_workers(lives) == frozenset(), "it may not have found this router yet"
    for _ in range(4):
        clock.now_s += 1.0
        second.beat()
        router.tick()
    assert router.silent_workers(lives) == {"decode-0.1", "frozen.1"}
    router.report_lost(second.info.worker)
    assert second.info.worker not in router.silent_workers(lives), "a stream broke: it was heard a moment ago"
    first.beat()
    assert router.silent_workers(lives) == {"frozen.1"}
    assert SILENCE_S_MAX == 3.0


def test_a_quarantine_is_for_a_time_and_for_so_many() -> None:
    quarantine = Quarantine()
    quarantine.add(b"poison", 0.0)
    with pytest.raises(Poisonous):
        quarantine.check(b"poison", QUARANTINE_S - 1)
    quarantine.check(b"poison", QUARANTINE_S)
    quarantine.check(b"other", 1.0)
    for index in range(CONTENTS_MAX):
        quarantine.add(index.to_bytes(2, "big"), 1.0)
    quarantine.check(b"poison", 1.0)
    with pytest.raises(Poisonous):
        quarantine.check((0).to_bytes(2, "big"), 1.0)


def test_a_life_waits_the_longer_the_more_died_soon() -> None:
    backoff, now_s, waits = Backoff(), 0.0, list[float]()
    for _ in range(9):
        waits.append(backoff.begin("w", now_s))
        now_s += waits[-1] + SOON_S / 2
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, WAIT_S_MAX, WAIT_S_MAX]
    assert backoff.begin("other", now_s) == 0.0
    now_s += SOON_S
    assert backoff.begin("w", now_s) == 0.0, "it lived"


def test_a_role_changes_nothing_else_of_a_worker() -> None:
    duties = Assignment(Worker(Router(Clock()), info("w", "decode")), info("w", "decode"))
    duties.apply(Ack(role="mixed"))
    assert duties.info == replace(info("w", "decode"), role="mixed")
