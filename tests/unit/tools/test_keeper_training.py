# pyright: basic
"""The training of keeper: the fused model equals transformers' model, and the curriculum's decisions."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.train_keeper.model import Disturbance, Keeper, fuse, keeper_config
from tools.train_keeper.native import Kernels, compile_kernels
from tools.train_keeper.optimizer import Optimizer, orthogonalised
from tools.train_keeper.start import initial_weights
from tools.train_keeper.train import FINISH, GROW, LENGTHS, Progress, rate_share
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from transformers import Qwen3NextForCausalLM

pytestmark = pytest.mark.slow

CONFIG = keeper_config(852, 0, 1)


@pytest.fixture(scope="module", name="kernels")
def the_kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Kernels(compile_kernels(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(scope="module", name="theirs")
def the_transformers_model() -> Qwen3NextForCausalLM:
    model = Qwen3NextForCausalLM(CONFIG)
    model.load_state_dict(initial_weights(CONFIG, seed=3))
    return model.float().train()


def undisturbed(rows: int, length: int) -> Disturbance:
    return Disturbance(torch.zeros(rows, length), torch.arange(length).repeat(rows, 1))


def test_weights_come_back_from_the_exchange_unchanged(
    kernels: Kernels, theirs: Qwen3NextForCausalLM
) -> None:
    weights = theirs.state_dict()
    exported = Keeper(CONFIG, weights, kernels).exported()
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 3), (1, 32), (3, 77)])
def test_logits_and_gradients_are_those_of_transformers(
    kernels: Kernels, theirs: Qwen3NextForCausalLM, rows: int, length: int
) -> None:
    ours = Keeper(CONFIG, theirs.state_dict(), kernels)
    ids = torch.randint(5, 800, (rows, length), generator=torch.Generator().manual_seed(length))
    mine, reference = ours(ids, undisturbed(rows, length)), theirs(ids, use_cache=False).logits
    torch.testing.assert_close(mine, reference, atol=2e-4, rtol=2e-4)
    theirs.zero_grad()
    for logits in (mine, reference):
        cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = fuse(
        {name: grad for name, grad in grads.items() if grad is not None}, ours.layer_types, ours.heads
    )
    for name, weight in ours.weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, expected[name], atol=2e-4, rtol=2e-3, msg=name)


def test_selected_positions_are_those_of_the_flat_batch(kernels: Kernels) -> None:
    ours = Keeper(CONFIG, initial_weights(CONFIG, seed=3), kernels)
    ids = torch.randint(5, 800, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = ours(ids, undisturbed(2, 9)).flatten(0, 1)
    torch.testing.assert_close(ours(ids, undisturbed(2, 9), torch.tensor([3, 12])), whole[[3, 12]])


def test_reset_at_a_token_forgets_all_before_it_in_the_state(kernels: Kernels) -> None:
    heads_in = torch.randn(1, 20, 260, generator=torch.Generator().manual_seed(1))
    ours = Keeper(CONFIG, initial_weights(CONFIG, seed=3), kernels)
    changed = heads_in.clone()
    changed[:, :8] += 1.0
    reset = torch.zeros(1, 20)
    reset[0, 11] = -30.0  # three tokens after the change, beyond the reach of the convolution
    outs = [ours._linear_attention(0, rows, reset) for rows in (heads_in, changed)]
    torch.testing.assert_close(outs[0][:, 11:], outs[1][:, 11:])
    assert not torch.allclose(outs[0][:, :8], outs[1][:, :8])


@given(recall=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=600))
def test_length_grows_only_when_both_kinds_are_recalled_or_patience_ends(
    recall: list[tuple[float, float]],
) -> None:
    progress = Progress(0)
    for accuracies in recall:
        before = replace(progress)
        grown = progress.record(progress.level, accuracies)
        assert progress.level == before.level + grown < len(LENGTHS)
        if grown:
            moved = [0.9 * old + 0.1 * new for old, new in zip(before.recall, accuracies, strict=True)]
            patient = before.batches + 1 < Progress.BATCHES_MAX
            assert not patient or (
                min(moved) > Progress.ENOUGH and before.batches + 1 >= Progress.BATCHES_MIN
            )
            assert progress.batches == 0


def test_batches_of_other_lengths_do_not_count() -> None:
    progress = Progress(2)
    assert not any(progress.record(1, (1.0, 1.0)) for _ in range(2 * Progress.BATCHES_MAX))
    assert progress == Progress(2)


@pytest.mark.parametrize("stage", [GROW, FINISH])
def test_rates_rise_then_fall_and_never_reach_zero(stage: object) -> None:
    assert stage in (GROW, FINISH)
    chosen = GROW if stage is GROW else FINISH
    shares = [rate_share(chosen, step) for step in range(chosen.steps)]
    peak = shares.index(max(shares))
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert min(shares) > 0


@pytest.mark.parametrize("shape", [(2, 5, 17), (1, 17, 5), (3, 8, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    gradients = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalised(gradients, 5))
    assert values.min() > 0.3
    assert values.max() < 1.5


def test_optimizer_step_lowers_a_simple_loss() -> None:
    weights = {
        name: Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
        for name, shape in (("embedding", (6, 4)), ("0_in", (4, 4)), ("0_conv", (4, 4)), ("norm", (4,)))
    }
    optimizer = Optimizer(weights, newton_schulz_steps=4)
    losses: list[float] = []
    for _ in range(20):
        loss = sum((weight**2).sum() for weight in weights.values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(0.01, 0.01)
    assert losses == sorted(losses, reverse=True)


def test_compiling_without_a_compiler_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(FileNotFoundError, match="install it"):
        compile_kernels(tmp_path)
