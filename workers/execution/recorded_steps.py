"""Steps on a CPU as one recording of the model, which is replayed with the sizes of each step.

A recording has the addresses of its inputs. So every step is written into the same memory, the first part of
the largest step; page tables have their maximum width.
"""

from collections.abc import Callable
from dataclasses import fields

import torch

from tidemill.kernels.shared.recording import Sizes
from tidemill.workers.execution.cuda_graphs import padding
from tidemill.workers.models.architectures.registry import Model
from tidemill.workers.models.inputs import Caches, Inputs, Kept

LEAST = Sizes(64, 32, 32, 64)
"""The sizes that the steps which are run for a recording do not exceed."""


class RecordedSteps:
    """The recording of a model, for steps of up to `tokens_max` tokens in `rows_max` rows, with tables of up
    to `table_width` pages."""

    def __init__(
        self, model: Model, caches: Caches, tokens_max: int, rows_max: int, table_width: int
    ) -> None:
        """Record. It runs two steps of padding."""
        self._most = most = Sizes(*map(max, (tokens_max, rows_max, tokens_max, tokens_max), LEAST))
        first = most.tokens - most.rows + 1
        self._inputs = padding(most.rows, table_width, max(1, first), windows=caches.has_windows)
        self._writes = torch.full((most.rows * most.states,), -1, dtype=torch.int32)
        self._kept = Kept(torch.arange(most.tokens), torch.zeros(most.rows + 1, dtype=torch.int32))

        def step_of(sizes: Sizes) -> Callable[[], torch.Tensor]:
            first = sizes.tokens - sizes.rows + 1
            step = padding(sizes.rows, 1, first, windows=caches.has_windows, states=sizes.states)
            last_K = torch.arange(sizes.tokens - sizes.kept, sizes.tokens)
            starts = (0, *range(sizes.kept - sizes.rows + 1, sizes.kept + 1))
            inputs, kept = self._written(step, Kept(last_K, torch.tensor(starts, dtype=torch.int32)))
            return lambda: model.forward(inputs, caches, kept)

        self._replay = None if model.ops.capture is None else model.ops.capture(step_of, most)

    def forward(self, step: Inputs, kept: Kept | None = None) -> torch.Tensor | None:
        """Return the hidden states `[T, hidden]` of a step, or those of `kept`, valid until the next one.
        None: it is larger than the recording, or the model cannot be recorded."""
        kept = kept or Kept(torch.arange(len(step.tokens_T)), step.cu_B1)
        rows, states = step.writes_BK.shape
        sizes = Sizes(len(step.tokens_T), rows, states, len(kept.tokens_K))
        fits = all(size <= most for size, most in zip(sizes, self._most, strict=True))
        if self._replay is None or not fits or step.pages_BN.shape[1] > self._inputs.pages_BN.shape[1]:
            return None
        self._written(step, kept)
        return self._replay(sizes)

    def _written(self, step: Inputs, kept: Kept) -> tuple[Inputs, Kept]:
        """Write the step into the memory of the recording, and return it there."""
        parts: dict[str, torch.Tensor] = {}
        for field in fields(Inputs):
            source: torch.Tensor = getattr(step, field.name)
            whole: torch.Tensor = getattr(self._inputs, field.name)
            if field.name == "writes_BK":
                whole = self._writes[: source.numel()].view(source.shape)
            parts[field.name] = target = whole[: len(source)]
            (target if source.ndim == 1 else target[:, : source.shape[1]]).copy_(source)
        pairs = zip(self._kept, kept, strict=True)
        return Inputs(**parts), Kept(*(whole[: len(source)].copy_(source) for whole, source in pairs))
