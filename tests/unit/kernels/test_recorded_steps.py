"""Recorded decode steps: the bits of plain ones, whatever ran before, and no recording that leaves out what
torch computes."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.parity.architectures import MODELS, random_model, save
from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.workers.execution.recorded_steps import RecordedSteps
from tidemill.workers.models.architectures.registry import LoadedModel, load
from tidemill.workers.models.inputs import Caches, Inputs

PAGE_TOKENS = 4
TABLE_WIDTH = 16
VOCABULARY = 64
RECORDED = {"llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""The architectures in whose decode steps torch computes nothing."""


class Recorded:
    """A model whose decode steps are recorded. `decoded` counts those that were not run plainly."""

    def __init__(self, loaded: LoadedModel, caches: Caches) -> None:
        self._model = loaded.model
        self.ops = loaded.model.ops
        self.logits = loaded.model.logits
        self.steps = RecordedSteps(loaded.model, caches, TABLE_WIDTH)
        self.decoded = 0

    def forward(self, inputs: Inputs, caches: Caches) -> torch.Tensor:
        hidden_TH = self.steps.forward(inputs)
        if hidden_TH is None:
            return self._model.forward(inputs, caches)
        self.decoded += 1
        return hidden_TH.clone()  # it is valid until the next step


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
    model = Recorded(loaded, recorded.caches)
    recorded.loaded = replace(loaded, model=model)
    rng = Random(0)
    tokens = [[rng.randrange(3, VOCABULARY) for _ in range(40)] for _ in range(5)]
    pairs = [(plain.add(list(each)), recorded.add(list(each))) for each in tokens]
    with torch.inference_mode():
        for _ in range(40):
            chosen = [pair for pair in pairs if pair[0].computed < 36]
            chosen = rng.sample(chosen, rng.randrange(1, len(chosen) + 1)) if chosen else []
            counts = [1 if first.computed else 5 for first, _ in chosen]
            if not chosen:
                break
            one = plain.step([(first, count) for (first, _), count in zip(chosen, counts, strict=True)])
            other = recorded.step(
                [(second, count) for (_, second), count in zip(chosen, counts, strict=True)]
            )
            assert torch.equal(one, other)
    assert torch.equal(plain.arena, recorded.arena)
    assert (model.decoded > 10) is (name in RECORDED)
    assert set(model.steps.recorded_rows) == ({1, 2, 3, 4, 5} if name in RECORDED else set())


def test_what_torch_computes_is_not_recorded(cpu: Operators) -> None:
    x_TH, weight_H = torch.randn(3, 8), torch.ones(8)
    assert cpu.capture is not None
    replay, y_TH = cpu.capture(lambda: cpu.rms_norm(x_TH * 2, weight_H, 1e-6))
    assert replay is None
    assert torch.equal(y_TH, cpu.rms_norm(x_TH * 2, weight_H, 1e-6))
    replay, y_TH = cpu.capture(lambda: cpu.rms_norm(x_TH.view(3, 2, 4).flatten(1), weight_H, 1e-6))
    assert replay is not None
    x_TH.copy_(torch.randn(3, 8))
    replay()
    assert torch.equal(y_TH, cpu.rms_norm(x_TH, weight_H, 1e-6))


def test_copies_that_torch_makes_are_not_recorded(cpu: Operators) -> None:
    x_HT, weight_H = torch.randn(8, 3), torch.ones(8)
    assert cpu.capture is not None
    assert cpu.capture(lambda: cpu.rms_norm(x_HT.T.contiguous(), weight_H, 1e-6))[0] is None
    assert cpu.capture(lambda: cpu.rms_norm(x_HT.view(2, 4, 3).mT.reshape(3, 8), weight_H, 1e-6))[0] is None


def test_what_torch_writes_in_place_is_not_recorded(cpu: Operators) -> None:
    x_TH, weight_H = torch.randn(3, 8), torch.ones(8)
    assert cpu.capture is not None
    assert cpu.capture(lambda: cpu.rms_norm(x_TH, weight_H, 1e-6).mul_(2))[0] is None


def test_memory_that_is_still_read_is_not_used_again(cpu: Operators) -> None:
    x_TH, weight_H = torch.randn(3, 8), torch.ones(8)
    assert cpu.capture is not None

    def both() -> torch.Tensor:
        first_TH = cpu.rms_norm(x_TH, weight_H, 1e-6)
        second_TH = cpu.rms_norm(first_TH, weight_H, 1.0)
        return cpu.add_norm(first_TH, second_TH, weight_H, 1e-6)[1]

    replay, y_TH = cpu.capture(both)
    assert torch.equal(y_TH, both())
    assert replay is not None
    replay()
    assert torch.equal(y_TH, both())


def test_recordings_share_their_memory(cpu: Operators) -> None:
    weight_H = torch.ones(8)
    assert cpu.capture is not None

    def twice(x_TH: torch.Tensor) -> torch.Tensor:
        return cpu.rms_norm(cpu.rms_norm(x_TH, weight_H, 1e-6), weight_H, 1.0)

    few_TH, many_TH = torch.randn(3, 8), torch.randn(7, 8)
    many, many_result_TH = cpu.capture(lambda: twice(many_TH))
    few, few_result_TH = cpu.capture(lambda: twice(few_TH))
    assert many is not None
    assert few is not None
    for _ in range(2):
        many()
        assert torch.equal(many_result_TH, twice(many_TH))
        few()
        assert torch.equal(few_result_TH, twice(few_TH))


def test_operators_that_cannot_be_recorded_run_plainly() -> None:
    assert REFERENCE.capture is None
