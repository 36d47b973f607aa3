"""A worker checks its memory when it is idle and after faults; a violation ends it, and its streams move."""

import asyncio
import logging
from collections import Counter
from contextlib import aclosing

import pytest

from tests.support.workers.bench import Bench, a_request, bench, prompt, run
from tidemill.workers.engine.audit import Audit, OwnershipBroken
from tidemill.workers.messages import Request, WorkerGone


class Checked:
    """Counts checks, and breaks when it is `broken`."""

    def __init__(self, objects: int = 10) -> None:
        self.counters = Counter[str]()
        self.checks = 0
        self.broken = False
        self.audit = Audit(self._check, lambda: objects, self.counters)

    def _check(self) -> None:
        self.checks += 1
        assert not self.broken, "a page has two owners"


def test_check_follows_faults_and_work_and_takes_a_small_share_of_the_time() -> None:
    checked = Checked()
    checked.audit.run(1.0, idle=True)
    assert checked.checks == 0, "nothing has run"
    checked.audit.run(2.0, idle=False)
    assert checked.checks == 0, "no fault, and busy"
    checked.audit.run(3.0, idle=True)
    checked.audit.run(4.0, idle=True)
    assert checked.checks == 1
    for _ in range(1000):
        checked.audit.fault("a request was cancelled", 5.0)
        checked.audit.run(5.0, idle=False)
    assert checked.checks == checked.counters["ownership_checks"] == 2
    long = Checked(objects=1_000_000)
    long.audit.fault("a step broke", 1.0)
    long.audit.run(1.0, idle=False)
    assert long.checks == 0, "a long one waits until the worker is idle"
    long.audit.run(1.0, idle=True)
    assert long.checks == 1


def test_violation_is_counted_and_logged_with_the_newest_events(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked()
    for number in range(60):
        checked.audit.fault(f"event {number}", 1.0)
    checked.broken = True
    with caplog.at_level(logging.CRITICAL), pytest.raises(OwnershipBroken, match="a page has two owners"):
        checked.audit.run(2.0, idle=False)
    assert checked.counters["ownership_violations"] == 1
    assert "event 59" in caplog.text
    assert "event 10\n" in caplog.text
    assert "event 9\n" not in caplog.text


async def cancelled(worker: Bench, request: Request) -> None:
    async with aclosing(worker.engine.generate(request)) as deltas:
        async for _ in deltas:
            return


def test_planted_leak_ends_the_worker_and_its_streams_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moved_on: list[bool] = []

    async def main() -> None:
        async with bench(num_extents=200) as worker:
            streaming = asyncio.create_task(worker.answer(a_request(prompt(9, 1, 3), 500)))
            await worker.until(lambda: worker.count("generated_tokens") > 5)
            release = worker.ledger.release

            def leaking(request_id: str) -> None:
                lease = worker.ledger._leases[request_id]
                lease.private_pages.pop()
                lease.rebuild_page_table()
                release(request_id)

            monkeypatch.setattr(worker.ledger, "release", leaking)
            await cancelled(worker, a_request(prompt(9, 2, 3), 50, request_id="cancelled"))
            monkeypatch.setattr(worker.ledger, "release", release)
            with pytest.raises(WorkerGone):
                await streaming
            assert worker.count("ownership_violations") == 1
            moved_on.append(True)
            await worker.loop

    with pytest.raises(OwnershipBroken):
        run(main())
    assert moved_on, "the worker ended and its stream did not"
