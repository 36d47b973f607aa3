"""Steps of a group that are launched ahead (execution/overlapped_runner.py): no host reads a token in them.

    leader   launch i | launch i+1       stream   forward i, draws -> tokens | forward i+1 ...
    rank     launch i | launch i+1       stream   forward i        -> tokens | forward i+1 ...

The leader's tokens go from device to device, by the exchange of the model. All ranks know from the rows of a
step whether it goes ahead. Of the step before, if that ran alone, only the leader's host has the tokens:
those go through host memory, once.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from tidemill.kvstore.memory.ledger import FLIGHTS_MAX
from tidemill.workers.execution.overlapped_runner import LaunchedStep, OverlappedRunner, StepEvent
from tidemill.workers.execution.step import PENDING, Drawn, Step
from tidemill.workers.parallel.exchange import Exchange
from tidemill.workers.parallel.frames import NONE
from tidemill.workers.parallel.group import GroupRunner
from tidemill.workers.parallel.rank_runner import RankRunner


class OverlappedGroupRunner(GroupRunner, OverlappedRunner):
    """The runner of the leader."""

    def _launch_ahead(self, step: Step) -> LaunchedStep:
        with self._together():
            return super()._launch_ahead(step)

    def _known(self, step: Step, last: Mapping[str, int]) -> Mapping[str, int]:
        if names := _pending(step):
            tokens_N = torch.tensor([last.get(name, NONE) for name in names])
            self._group.exchange.control.broadcast(tokens_N)
        return last


class OverlappedRankRunner(RankRunner, OverlappedRunner):
    """The runner of another rank, on the caller's thread, which may be two launches ahead of its device."""

    def __init__(self, exchange: Exchange, *runner: Any) -> None:  # noqa: ANN401  see GroupRunner
        super().__init__(exchange, *runner)
        self._launched = deque[StepEvent](maxlen=FLIGHTS_MAX)

    def run_now(self, step: Step) -> list[Drawn]:
        if not self._goes_ahead(step):
            self._newest = None
            return super().run_now(step)
        if len(self._launched) == FLIGHTS_MAX:
            self._launched[0].synchronize()  # its buffers are used again
        launched = self._launch_ahead(step)
        launched.reads = None  # only the leader asks whether that one landed
        self._launched.append(launched.event)
        return []

    def _known(self, step: Step, last: Mapping[str, int]) -> Mapping[str, int]:
        names = _pending(step)
        tokens_N = torch.zeros(len(names), dtype=torch.int64)
        if names:
            self._exchange.control.broadcast(tokens_N)
        return {**last, **dict(zip(names, tokens_N.numpy().tolist(), strict=True))}


def _pending(step: Step) -> list[str]:
    return [row.sequence_id for row in step if PENDING in row.tokens]
