# pyright: basic
# transformers' classes have no usable types.
"""Steps through graphs that capture nothing, against the same steps without: for operators of any variant."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support.parity.steps import Runner
from tests.support.parity.steps import Sequence as Fed
from tidemill.kernels.dispatch import Operators
from tidemill.workers.execution.cuda_graphs import Forward, Graphs, Replay, graph_shapes
from tidemill.workers.models.architectures.registry import load
from tidemill.workers.models.inputs import Caches, Inputs

CPU = torch.device("cpu")
PAGE_TOKENS = 16
ROWS_MAX = 8
TABLE_WIDTH = 9
PROMPTS = (1, 15, 16, 17, 40)
CHOSEN = ([0, 1, 2, 3, 4], [4, 1, 0], [2], [3, 2])
VOCABULARY = 8


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
        drawn = [torch.randint(VOCABULARY, (count,), generator=draw).tolist() for count in lengths]
        self.sequences = [self.runner.add(tokens, len(tokens) + 20) for tokens in drawn]
        for sequence in self.sequences:
            self.runner.step([(sequence, len(sequence.tokens))])

    @property
    def caches(self) -> Caches:
        return self.runner.caches

    def memory(self) -> list[torch.Tensor]:
        """The bits of the whole arena, as pages and as states."""
        caches = self.caches
        return [tensor.clone().view(torch.int32) for tensor in (*caches.kv, *caches.conv, *caches.temporal)]

    def restore(self, memory: list[torch.Tensor]) -> None:
        caches = self.caches
        for tensor, bits in zip((*caches.kv, *caches.conv, *caches.temporal), memory, strict=True):
            tensor.copy_(bits.view(torch.float32))

    def following(self, sequences: list[Fed], new: Sequence[int]) -> Inputs:
        """Return a step of these numbers of tokens after each of the sequences."""
        ends = [sequence.computed + count for sequence, count in zip(sequences, new, strict=True)]
        width = -(-max(ends) // PAGE_TOKENS)
        positions = [
            sequence.computed + i
            for sequence, count in zip(sequences, new, strict=True)
            for i in range(count)
        ]
        return Inputs(
            tokens_T=torch.arange(len(positions)) % VOCABULARY,
            positions_T=torch.tensor(positions),
            cu_B1=torch.tensor([0, *new]).cumsum(0).int(),
            pages_BN=torch.tensor(
                [(*sequence.pages, *[0] * width)[:width] for sequence in sequences], dtype=torch.int32
            ),
            windows_BN=torch.zeros(len(new), 0, dtype=torch.int32),
            lens_B=torch.tensor(ends, dtype=torch.int32),
            read_B=torch.tensor([sequence.state for sequence in sequences], dtype=torch.int32),
            writes_BK=torch.tensor([[sequence.state] for sequence in sequences], dtype=torch.int32),
        )


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
            sequences = [bed.sequences[index] for index in some]
            # One each, guesses in each row, or a tail in one of them.
            new = [1 + more * (more == 3 or index == 0) for index in range(len(some))]
            if sum(new) > rows_max + 16:
                continue
            step = bed.following(sequences, new)
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
