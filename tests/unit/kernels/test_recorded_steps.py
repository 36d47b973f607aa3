"""Recorded steps: the bits of plain ones, whatever ran before, also of what torch computes; and no recording
where a replay would compute something else."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import sub
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional

from tests.support.parity.architectures import MODELS, random_model, save
from tests.support.parity.steps import Runner
from tests.unit.kernels.test_stored import CODE_KINDS, stored
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.stored import Kind, plain
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.recording import Replay, Sizes
from tidemill.workers.execution.recorded_steps import RecordedSteps
from tidemill.workers.models.architectures.registry import LoadedModel, load
from tidemill.workers.models.inputs import Caches, Inputs, Kept

PAGE_TOKENS = 4
PROMPT_TOKENS = 160
TABLE_WIDTH = 40
TOKENS_MAX = 600
VOCABULARY = 64
WIDTH = 8
MOST = Sizes(128, 64, 32, 128)


class Stepped:
    """A model that runs steps plainly, or from a recording, whose rows may keep from 1 to 3 states each. It
    returns the hidden states of some of the last tokens of each row, and zeros in place of others. The
    recording computes no others."""

    def __init__(self, loaded: LoadedModel, caches: Caches | None) -> None:
        self._model = loaded.model
        self.ops = loaded.model.ops
        self.logits = loaded.model.logits
        self._steps = (
            None if caches is None else RecordedSteps(loaded.model, caches, TOKENS_MAX, 5, TABLE_WIDTH)
        )
        self._ran = 0

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
        assert kept is None
        self._ran += 1
        wider_BK = functional.pad(inputs.writes_BK, (self._ran % 3, 0), value=-1)
        inputs = replace(inputs, writes_BK=wider_BK)
        kept = drawn_kept(inputs, Random(self._ran))
        if self._steps is None:
            found_KH = self._model.forward(inputs, caches)[kept.tokens_K]
        else:
            recorded_KH = self._steps.forward(inputs, kept)
            assert recorded_KH is not None
            found_KH = recorded_KH
        hidden_TH = found_KH.new_zeros(len(inputs.tokens_T), found_KH.shape[1])
        return hidden_TH.index_copy_(0, kept.tokens_K, found_KH)


def drawn_kept(inputs: Inputs, rng: Random) -> Kept:
    """Return some of the last tokens of each row, of at least one row."""
    starts = [int(start) for start in inputs.cu_B1]
    kept = [rng.choice((0, 1, min(3, count), count)) for count in map(sub, starts[1:], starts)]
    kept[0] = kept[0] if any(kept) else 1
    tokens = [token for end, count in zip(starts[1:], kept, strict=True) for token in range(end - count, end)]
    return Kept(torch.tensor(tokens), torch.tensor([0, *accumulate(kept)], dtype=torch.int32))


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("half", [False, True])
def test_recorded_steps_have_the_bits_of_plain_ones(
    tmp_path: Path, cpu: Operators, half_cpu: Operators, name: str, *, half: bool
) -> None:
    dtype: ComputeDtype = "bfloat16" if half else "float32"
    drawn = random_model(name)
    folder = save(drawn.bfloat16() if half else drawn, tmp_path / "model")
    loaded = load(folder, half_cpu if half else cpu, lambda _done, _total: None, compute_dtype=dtype)
    plain, recorded = Runner(loaded, PAGE_TOKENS), Runner(loaded, PAGE_TOKENS)
    with torch.inference_mode():
        plain.loaded = replace(loaded, model=Stepped(loaded, None))
        recorded.loaded = replace(loaded, model=Stepped(loaded, recorded.caches))
        rng = Random(0)
        tokens = [[rng.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(5)]
        pairs = [(plain.add(list(each)), recorded.add(list(each))) for each in tokens]
        while going := [pair for pair in pairs if pair[0].computed < PROMPT_TOKENS]:
            chosen = rng.sample(going, rng.randrange(1, len(going) + 1))
            counts = [
                min(rng.choice((1, 1, 1, 5, 12, 110)), PROMPT_TOKENS - first.computed) for first, _ in chosen
            ]
            one = plain.step([(first, count) for (first, _), count in zip(chosen, counts, strict=True)])
            other = recorded.step(
                [(second, count) for (_, second), count in zip(chosen, counts, strict=True)]
            )
            assert torch.equal(one, other)
    assert torch.equal(plain.arena, recorded.arena)


def test_larger_steps_run_plainly(tmp_path: Path, cpu: Operators) -> None:
    loaded = load(save(random_model("qwen3"), tmp_path / "model"), cpu, lambda _done, _total: None)
    runner = Runner(loaded, PAGE_TOKENS)
    for table_width, most in ((2, 2 * PAGE_TOKENS), (TOKENS_MAX, TOKENS_MAX)):
        with torch.inference_mode():
            steps = RecordedSteps(loaded.model, runner.caches, TOKENS_MAX, 5, table_width)
            for count in (1, most, most + 1):
                rows = [(runner.add([1] * count), count)]
                inputs = runner.inputs(rows)
                assert (steps.forward(inputs) is not None) is (count <= most)


def captured(
    cpu: Operators, compute: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, Replay | None]:
    """Return the memory of an input `[T, WIDTH]`, and what repeats the computation for it."""
    assert cpu.capture is not None
    x_TH = torch.randn(MOST.tokens, WIDTH)
    return x_TH, cpu.capture(lambda sizes: lambda: compute(x_TH[: sizes.tokens]), MOST)


def check(cpu: Operators, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x_TH, replay = captured(cpu, compute)
    assert replay is not None
    for tokens in (3, 128, 1, 41, 37):
        x_TH.copy_(torch.randn(MOST.tokens, WIDTH))
        assert torch.equal(replay(Sizes(tokens, 1, 1, 1)), compute(x_TH[:tokens]))


def test_what_torch_computes_is_computed_again(cpu: Operators) -> None:
    weight_H = torch.ones(WIDTH)

    def compute(x_TH: torch.Tensor) -> torch.Tensor:
        doubled_TH = torch.cat([x_TH[:, 4:], x_TH[:, :4]], dim=1) * 2
        normed_TH = cpu.rms_norm(doubled_TH, weight_H, 1e-6)
        turned_TH = normed_TH.view(-1, 2, 4).mT.reshape(-1, 8)
        return cpu.rms_norm(turned_TH, weight_H, 1.0) + doubled_TH

    check(cpu, compute)


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_codes_are_looked_up_and_multiplied_again(cpu: Operators, kind: Kind) -> None:
    table = stored(kind, 5, WIDTH, 4, shifted=True)
    parts = [stored(kind, 3, WIDTH, 8, shifted=False), plain(torch.randn(2, WIDTH)), table]
    weight = cpu.pack(parts, torch.randn(10))

    def compute(x_TH: torch.Tensor) -> torch.Tensor:
        tokens_T = x_TH[:, 0].abs().clamp(max=4).long()
        return cpu.linear(cpu.embed(tokens_T, table), weight)

    check(cpu, compute)


def test_memory_that_is_still_read_is_not_used_again(cpu: Operators) -> None:
    weight_H = torch.ones(WIDTH)

    def both(x_TH: torch.Tensor) -> torch.Tensor:
        first_TH = cpu.rms_norm(x_TH, weight_H, 1e-6)
        second_TH = cpu.rms_norm(first_TH, weight_H, 1.0)
        return cpu.add_norm(first_TH, second_TH, weight_H, 1e-6)[1]

    check(cpu, both)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Python reads a number": lambda x_TH: x_TH * float(x_TH[0, 0].abs()),
    "values decide on the size": lambda x_TH: x_TH[x_TH[:, 0] > 0],
    "several results": lambda x_TH: x_TH.max(dim=0).values[None],
    "torch writes in place": lambda x_TH: x_TH.mul_(2),
    "strides depend on the size": lambda x_TH: x_TH.T.contiguous().T.contiguous(),
    "twice the memory": lambda x_TH: x_TH.repeat(2, 1),
    "a number depends on the size": lambda x_TH: x_TH * len(x_TH) ** 2,
    "the computation depends on the size": lambda x_TH: x_TH if len(x_TH) > 40 else x_TH * 2,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_replay_would_compute_otherwise_is_not_recorded(cpu: Operators, name: str) -> None:
    _, replay = captured(cpu, lambda x_TH: cpu.rms_norm(CHANGES[name](x_TH), torch.ones(WIDTH), 1e-6))
    assert replay is None


def test_number_of_tokens_in_a_call_otherwise_is_not_recorded(cpu: Operators) -> None:
    weight_H = torch.ones(WIDTH)
    _, replay = captured(cpu, lambda x_TH: cpu.rms_norm(x_TH, weight_H, float(len(x_TH))))
    assert replay is None
