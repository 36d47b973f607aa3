"""Commands of operators, silent workers, the quarantine and the restart backoff."""

from dataclasses import dataclass

import pytest

from tests.support.cluster.heartbeats import heartbeat, worker_info
from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.processes.restart_backoff import SOON_S, WAIT_S_MAX, Backoff
from tidemill.cluster.router.quarantine import CONTENTS_MAX, QUARANTINE_S, Quarantine
from tidemill.cluster.router.router import SILENCE_S_MAX, Router
from tidemill.cluster.worker.assignment import Assignment
from tidemill.workers.messages import Ack, Poisonous, RequestError, Role, WorkerId, WorkerInfo


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Worker:
    """A worker that sends heartbeats and follows the answers."""

    router: Router
    info: WorkerInfo
    takes: tuple[bool, bool] = (True, True)

    def __post_init__(self) -> None:
        self.assignment = Assignment(self, self.info)

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self.takes = (produces, generates)

    def report(self) -> Ack:
        ack = self.router.heartbeat(heartbeat(self.assignment.info, draining=self.assignment.draining))
        self.assignment.apply(ack)
        return ack


def fleet(router: Router, *roles: Role) -> list[Worker]:
    workers = [Worker(router, worker_info(f"{role}-{index}", role)) for index, role in enumerate(roles)]
    for worker in workers:
        worker.report()
    return workers


def states(router: Router) -> dict[str, str]:
    return {row.info.name: row.state for row in router.status().workers}


def test_drain_lasts_until_it_is_undone() -> None:
    router = Router(Clock())
    first, second = fleet(router, "decode", "decode")
    router.carry_out(Drain("decode-0"))
    assert first.report().drain
    assert first.takes == (False, False)
    assert states(router) == {"decode-0": "draining", "decode-1": "ready"}
    assert not second.report().drain
    assert first.report().drain
    router.carry_out(Drain("decode-0", drain=False))
    first.report()
    first.report()
    assert states(router)["decode-0"] == "ready"
    assert first.takes == (False, True), "as its role allows"


def test_drain_of_the_last_worker_of_a_role_needs_force() -> None:
    router = Router(Clock())
    fleet(router, "prefill", "decode", "mixed")
    with pytest.raises(RequestError, match="the only worker that takes prompts") as refused:
        router.carry_out(Drain("prefill-0"))
    assert refused.value.status == 409
    router.carry_out(Drain("decode-1"))
    with pytest.raises(RequestError, match="the only worker that takes streams"):
        router.carry_out(Drain("mixed-2"))
    with pytest.raises(RequestError, match="streams"):
        router.carry_out(SetRole("mixed-2", "prefill"))
    router.carry_out(Drain("mixed-2", force=True))
    with pytest.raises(
        RequestError, match="there is no worker absent, the workers are: decode-1, mixed-2, prefill-0"
    ):
        router.carry_out(Drain("absent"))


def test_restarted_router_keeps_drains() -> None:
    router = Router(Clock())
    first, _ = fleet(router, "decode", "decode")
    router.carry_out(Drain("decode-0"))
    first.report()
    first.router = Router(Clock())
    assert first.report().drain
    assert first.takes == (False, False)
    first.router.carry_out(Drain("decode-0", drain=False))
    first.report()
    assert first.takes == (False, True), "as its role allows"


def test_restarted_worker_takes_work_in_the_same_role() -> None:
    router = Router(Clock())
    fleet(router, "decode", "decode")
    router.carry_out(Drain("decode-0"))
    router.carry_out(SetRole("decode-0", "mixed"))
    again = Worker(router, worker_info("decode-0.2"))
    ack = again.report()
    assert (ack.drain, ack.role) == (False, "mixed")


def test_role_changes_at_the_next_heartbeat() -> None:
    router = Router(Clock())
    prefill, decode, _ = fleet(router, "prefill", "decode", "decode")
    router.carry_out(SetRole("decode-1", "prefill"))
    decode.report()
    assert decode.takes == (True, False)
    decode.report()
    assert {row.info.name: row.info.role for row in router.status().workers}["decode-1"] == "prefill"
    router.carry_out(SetRole("prefill-0", "decode"))
    prefill.report()
    assert prefill.takes == (False, True)
    router.carry_out(SetRole("prefill-0", "mixed"))
    prefill.report()
    assert prefill.takes == (True, True)


def test_leaving_worker_takes_no_work_whatever_its_commands_are() -> None:
    router = Router(Clock())
    first, _ = fleet(router, "decode", "decode")
    first.assignment.leave()
    assert first.takes == (False, False)
    first.report()
    assert states(router)["decode-0"] == "draining"
    router.carry_out(Drain("decode-0"))
    first.report()
    router.carry_out(Drain("decode-0", drain=False))
    router.carry_out(SetRole("decode-0", "mixed"))
    first.report()
    assert first.takes == (False, False)


def test_silent_workers_include_those_that_the_router_never_knew() -> None:
    clock = Clock()
    router = Router(clock)
    first, second = fleet(router, "decode", "decode")
    workers = [first.info.worker, second.info.worker, WorkerId("frozen.1")]
    assert router.silent_workers(workers) == frozenset(), "it may not have found this router yet"
    for _ in range(4):
        clock.now_s += 1.0
        second.report()
        router.tick()
    assert router.silent_workers(workers) == {"decode-0.1", "frozen.1"}
    router.report_lost(second.info.worker)
    assert second.info.worker not in router.silent_workers(workers), (
        "a stream broke, but its last heartbeat is recent"
    )
    first.report()
    assert router.silent_workers(workers) == {"frozen.1"}
    assert SILENCE_S_MAX == 3.0


def test_quarantine_is_bounded_in_time_and_number() -> None:
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


def test_backoff_grows_with_each_early_crash() -> None:
    backoff, now_s, waits = Backoff(), 0.0, list[float]()
    for _ in range(9):
        waits.append(backoff.begin("w", now_s))
        now_s += waits[-1] + SOON_S / 2
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, WAIT_S_MAX, WAIT_S_MAX]
    assert backoff.begin("other", now_s) == 0.0
    now_s += SOON_S
    assert backoff.begin("w", now_s) == 0.0, "it ran for long enough"
