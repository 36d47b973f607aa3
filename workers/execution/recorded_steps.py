"""Decode steps on a CPU as recordings: each number of rows is recorded when it first runs, and then replayed
in one call.

A recording has the addresses of its inputs. So every step is written into the same memory, the first rows of
the largest step; page tables have their maximum width.
"""

from dataclasses import fields
from typing import NamedTuple

import torch

from tidemill.kernels.shared.recording import Replay
from tidemill.workers.execution.cuda_graphs import padding
from tidemill.workers.models.architectures.registry import Model
from tidemill.workers.models.inputs import Caches, Inputs

ROWS_MAX = 128
"""The most rows of a recording."""


class RecordedStep(NamedTuple):
    replay: Replay
    hidden_TH: torch.Tensor


class RecordedSteps:
    """The recordings of a model for tables of up to `table_width` pages."""

    def __init__(self, model: Model, caches: Caches, table_width: int) -> None:
        self._model = model
        self._caches = caches
        self._inputs = padding(ROWS_MAX, table_width, windows=caches.has_windows)
        self._steps: dict[int, RecordedStep] = {}
        self._capture = model.ops.capture

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """The numbers of rows that have a recording."""
        return tuple(self._steps)

    def forward(self, step: Inputs, *, on_device: bool = False) -> torch.Tensor | None:
        """Return the hidden states `[T, hidden]` of a step, valid until the next one. None: it is none of one
        token and at most one kept state for each row, or the model cannot be recorded."""
        assert not on_device
        (rows, width), width_max = step.pages_BN.shape, self._inputs.pages_BN.shape[1]
        is_decode = len(step.tokens_T) == rows and step.writes_BK.shape[1] == 1
        if self._capture is None or not is_decode or rows > ROWS_MAX or width > width_max:
            return None
        inputs = _written(step, self._inputs)
        recorded = self._steps.get(rows)
        if recorded is not None:
            recorded.replay()
            return recorded.hidden_TH
        replay, hidden_TH = self._capture(lambda: self._model.forward(inputs, self._caches))
        if replay is None:
            self._capture = None
        else:
            self._steps[rows] = RecordedStep(replay, hidden_TH)
        return hidden_TH


def _written(step: Inputs, whole: Inputs) -> Inputs:
    """Write the step into the first rows of `whole`, and return these."""
    parts: dict[str, torch.Tensor] = {}
    for field in fields(Inputs):
        source: torch.Tensor = getattr(step, field.name)
        target: torch.Tensor = getattr(whole, field.name)[: len(source)]
        (target if source.ndim == 1 else target[:, : source.shape[1]]).copy_(source)
        parts[field.name] = target
    return Inputs(**parts)
