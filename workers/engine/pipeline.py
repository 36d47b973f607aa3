"""Run steps one after the other, at most two in flight: the next is launched before the tokens of this one
are read.

    launch i | launch i+1 | land i | launch i+2 | land i+1 | ...
    Runner     [....... i .......][....... i+1 ........][....... i+2 ..

A row's inputs from the step before it, a token and a state, stay in the Runner. A step that breaks ends no
other request: its requests run again one at a time, and the one that breaks a step alone gets the error. A
device that fails ends the worker, and blames no request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tidemill.workers.device_errors import is_sticky
from tidemill.workers.engine.commit import StepCommitter
from tidemill.workers.execution.step import Drawn, PagesLost, Runner
from tidemill.workers.messages import RequestError, WorkerGone
from tidemill.workers.scheduling.scheduler import Batch, Launched, Scheduler
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.transfer.speed_model import StepTimeModel

BEAT_S = 1.0

FAILURES_MAX = 8
"""The maximum number of consecutive broken steps. Beyond it the worker is broken and not a request."""


class Preempt(Protocol):
    def __call__(self, sequence: Sequence, error: Exception | None = None) -> None: ...


@dataclass(slots=True, eq=False)
class InFlight:
    batch: Batch
    answer: asyncio.Future[list[Drawn]]
    launched_s: float


class Pipeline:
    def __init__(
        self,
        runner: Runner,
        schedule: Scheduler,
        committer: StepCommitter,
        preempt: Preempt,
        landed_last: Callable[[Sequence], None],
        step_cpu_s: Callable[[], float],
    ) -> None:
        self.step_cpu_s = step_cpu_s
        self._runner = runner
        self._schedule = schedule
        self._committer = committer
        self._preempt = preempt
        self._landed_last = landed_last
        self._in_flight: deque[InFlight] = deque()
        self.speedometer = StepTimeModel()
        self._landed_s = 0.0
        self._failures = 0

    async def step(self, flights_max: int) -> bool:
        """Launch a step if one is ready, then land the oldest. Return False when none was in flight. Raises
        what broke the worker: WorkerGone, a sticky error of the device, or the error of a step after
        FAILURES_MAX of them."""
        while len(self._in_flight) < flights_max and self._launch():
            pass
        if not self._in_flight:
            return False
        step = self._in_flight[0]
        try:
            drawn = await asyncio.shield(step.answer)
        except WorkerGone:
            raise
        except Exception as error:
            if is_sticky(error):
                raise
            # A step whose rows have all ended ran on what the previous step lost, or on pages that are lost.
            if not (isinstance(error, PagesLost) or all(row.lease.ended for row in step.batch.rows)):
                self._failures += 1
            if self._failures == FAILURES_MAX:
                raise
            self._in_flight.popleft()
            self._broke(step.batch, error)
        else:
            self._failures = 0
            self._in_flight.popleft()
            self._time(step)
            for planned, what in zip(step.batch.rows, drawn, strict=True):
                self._land(planned, what)
        return True

    async def beat(self) -> None:
        """Run an empty step now and then while no step is in flight. A missing rank delays it, and so the
        step loop, as it would delay a step of requests."""
        assert not self._in_flight
        now_s = asyncio.get_running_loop().time
        if now_s() - self._landed_s > BEAT_S:
            await self._runner.run(())
            self._landed_s = now_s()

    async def settle(self) -> None:
        """Wait for the steps in flight and discard them: nothing writes to the memory afterwards."""
        while self._in_flight:
            step = self._in_flight.popleft()
            await asyncio.wait([step.answer])
            step.answer.exception()  # retrieved, so that asyncio does not log it
            for planned in step.batch.rows:
                self._committer.void(planned)

    def _land(self, planned: Launched, drawn: Drawn) -> None:
        if (drawn.late or drawn.error is not None) and not planned.lease.ended:
            self._committer.void(planned)
            self._preempt(planned.sequence, drawn.error)
        elif self._committer.commit(planned, drawn):
            self._landed_last(planned.sequence)

    def _launch(self) -> bool:
        batch = self._schedule.next_step(in_flight=bool(self._in_flight))
        if not batch.rows:
            return False
        try:
            answer = asyncio.ensure_future(self._runner.run(tuple(planned.row for planned in batch.rows)))
        except Exception as error:  # noqa: BLE001  it lands in order, like any step that breaks
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(error)
        self._in_flight.append(InFlight(batch, answer, asyncio.get_running_loop().time()))
        return True

    def _time(self, step: InFlight) -> None:
        now_s = asyncio.get_running_loop().time()
        seconds = now_s - max(step.launched_s, self._landed_s)
        self._schedule.landed(step.batch, seconds)
        prompts = [
            (planned.row.start, planned.row.end) for planned in step.batch.rows if planned.row.is_prompt
        ]
        self.speedometer.stepped(
            seconds,
            prompt_tokens=sum(end - start for start, end in prompts),
            pairs=sum((end - start) * (start + end) // 2 for start, end in prompts),
            rows=len(step.batch.rows) - len(prompts),
            followed=bool(self._in_flight),
        )
        self._landed_s = now_s

    def _broke(self, batch: Batch, error: Exception) -> None:
        for planned in batch.rows:
            self._committer.void(planned)
            if planned.lease.ended:
                continue
            if isinstance(error, PagesLost):
                self._preempt(planned.sequence)
                continue
            planned.sequence.isolation.until = planned.flight.end
            alone = len(batch.rows) == 1
            self._preempt(planned.sequence, _refusal(error) if alone else None)


def _refusal(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    return RequestError(
        f"the model broke on this request, and on no other ({type(error).__name__}: {error}): "
        "the worker's log has more",
        status=500,
        code="step_failed",
    )
