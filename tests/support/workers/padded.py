"""Steps through graphs that capture nothing, against the same steps without: for operators of any variant."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import Operators
from tidemill.workers.execution.cuda_graphs import Forward, Graphs, Replay, graph_shapes
from tidemill.workers.models.architectures.registry import load
from tidemill.workers.models.inputs import Caches

CPU = torch.device("cpu")
PAGE_TOKENS = 16
ROWS_MAX = 8
TABLE_WIDTH = 9
PROMPTS = (1, 15, 16, 17, 40)
CHOSEN = ([0, 1, 2, 3, 4], [4, 1, 0], [2], [3, 2])
VOCABULARY = 8
MORE = 20
"""Tokens of a sequence behind its prompt."""


def again(run: Forward) -> tuple[Replay, torch.Tensor]:
    """Capture as a device does, but compute again."""
    kept = run().clone()

    def replay() -> None:
        kept.copy_(run())

    return replay, kept


class Bed:
    """Prompts of these lengths in an arena that is NaN where nothing was written."""

    def __init__(self, folder: Path, ops: Operators, lengths: Sequence[int]) -> None:
        loaded = load(folder, ops, lambda _done, _total: None)
        self.model = loaded.model
        self.runner = Runner(loaded, PAGE_TOKENS)
        draw = torch.Generator().manual_seed(5)
        self.sequences = [
            self.runner.add(torch.randint(VOCABULARY, (count + MORE,), generator=draw).tolist())
            for count in lengths
        ]
        for sequence in self.sequences:
            self.runner.step([(sequence, len(sequence.tokens) - MORE)])

    @property
    def caches(self) -> Caches:
        return self.runner.caches

    def memory(self) -> list[torch.Tensor]:
        """The bits of the whole arena, as pages and as states."""
        caches = self.caches
        return [
            tensor.clone().view(torch.int32) for tensor in (*caches.plain_kv, *caches.conv, *caches.temporal)
        ]

    def restore(self, memory: list[torch.Tensor]) -> None:
        caches = self.caches
        for tensor, bits in zip((*caches.plain_kv, *caches.conv, *caches.temporal), memory, strict=True):
            tensor.copy_(bits.view(torch.float32))


def check_padding(
    folder: Path,
    ops: Operators,
    same: Callable[[torch.Tensor, torch.Tensor], bool],
    lengths: Sequence[int] = PROMPTS,
    chosen: Sequence[list[int]] = CHOSEN,
    rows_max: int = ROWS_MAX,
) -> None:
    """A step of some of the prompts that is padded answers the `same` as it is, and leaves the bits of all
    others alone."""
    bed = Bed(folder, ops, lengths)
    with torch.inference_mode():
        before = bed.memory()
        graphs = Graphs(
            lambda inputs: bed.model.forward(inputs, bed.caches),
            graph_shapes(rows_max, 30, 3),
            TABLE_WIDTH,
            CPU,
            again,
        )
        for some, more in [(some, more) for some in chosen for more in (0, 3, 5)]:
            # One each, guesses in each row, or a tail in one of them.
            new = [1 + more * (more == 3 or index == 0) for index in range(len(some))]
            if sum(new) > rows_max + 16:
                continue
            step = bed.runner.inputs(
                [(bed.sequences[at], count) for at, count in zip(some, new, strict=True)]
            )
            for bits, old in zip(bed.memory(), before, strict=True):
                assert torch.equal(bits, old), "capturing wrote, or a step was not undone"
            wanted_TH = bed.model.forward(step, bed.caches)
            wanted = bed.memory()
            bed.restore(before)
            found_TH = graphs.forward(step)
            assert found_TH is not None
            assert same(found_TH, wanted_TH)
            for bits, bare, old in zip(bed.memory(), wanted, before, strict=True):
                written = bare != old
                assert torch.equal(bits[~written], old[~written]), "more was written than without padding"
                assert same(bits.view(torch.float32)[written], bare.view(torch.float32)[written])
            bed.restore(before)
