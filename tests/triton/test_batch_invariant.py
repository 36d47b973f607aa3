"""The bits of a token with `batch_invariant` depend on its sequence alone: not on the rows beside it, nor on
the steps into which its sequence is cut. For norms, experts and the convolution the tests beside this one
hold without it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.support.kernels import paged, recurrences
from tests.support.kernels.cases import random, relative_error, same_bits, step
from tests.support.parity.architectures import random_model, save
from tests.support.triton import interpreter
from tests.triton.test_model import MIXED, Schedule, logits_of
from tidemill.kernels.dispatch import operators
from tidemill.kernels.linear import cuda, reference
from tidemill.kernels.linear.stored import plain

SCHEDULES: tuple[Schedule, ...] = ([[(0, 19)], [(1, 5)]], MIXED, [[(1, 1), (0, 2)], [(0, 17), (1, 4)]])
"""Two sequences, each whole; in long rows, short ones and single tokens; and beside each other."""


@pytest.mark.parametrize("name", ["qwen3_next/moe-two-values", "granitemoehybrid/moe"])
def test_logits_of_a_hybrid_do_not_depend_on_the_path(name: str, tmp_path: Path) -> None:
    folder = save(random_model(name).bfloat16(), tmp_path / "model")
    invariant = operators("triton", tmp_path, batch_invariant=True)
    first, *others = (logits_of(folder, invariant, "bfloat16", schedule) for schedule in SCHEDULES)
    assert all(same_bits(other, first) for other in others)
    if name.startswith("qwen3_next"):  # the bits would depend on the path
        fast = operators("triton", tmp_path)
        assert not same_bits(
            logits_of(folder, fast, "bfloat16", SCHEDULES[0]), logits_of(folder, fast, "bfloat16")
        )


def check_product(depth: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Multiply by floats, whose last step reads beyond no row: the next one is infinite."""
    draw = torch.Generator().manual_seed(depth)
    x = random(draw, 130, depth + 16)[:, 16:].to(device, dtype)
    values = torch.full((71, depth), torch.inf)
    values[:70] = random(draw, 70, depth)
    values, bias_N = values.to(device, dtype)[:70], random(draw, 70).to(device)
    weight = replace(cuda._pack_floats(values, bias_N), data=values)
    for call in (cuda.linear, cuda.logits, partial(cuda.linear_silu, into=weight)):
        whole = call(x, weight, batch_invariant=True)
        for rows in (slice(1), slice(1, 18), slice(7, 72)):
            assert same_bits(call(x[rows], weight, batch_invariant=True), whole[rows])
    wanted = reference.linear(x.double(), reference.pack([plain(values)], weight.bias_N))
    assert relative_error(cuda.logits(x, weight, batch_invariant=True), wanted) < 1e-5
    heads = cuda._pack_floats(values.view(2, 35, depth), None)
    x_THI = random(draw, 20, 2, depth).to(device, dtype)
    whole = cuda.linear_heads(x_THI, heads, batch_invariant=True)
    assert same_bits(cuda.linear_heads(x_THI[3:4], heads, batch_invariant=True), whole[3:4])


def dot(_: Any, a: Any, b: Any, c: Any, *__: Any) -> Any:  # noqa: ANN401
    """Add up in the order of the depth, as a matrix unit does for tiles of any width. BLAS does not."""
    left_NK, right_KM, sum_NM = interpreter.values(a), interpreter.values(b), c.data.copy()
    for k in range(len(right_KM)):
        sum_NM += left_NK[:, k : k + 1] * right_KM[k]
    return TensorHandle(sum_NM, c.dtype.scalar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [100, 1300])
def test_row_of_a_product_has_the_same_bits_in_any_batch(
    depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    check_product(depth, dtype)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_has_the_same_bits_however_a_row_is_cut(window: int | None) -> None:
    """Rows of many tokens, of few and of one; the gate is a launch of its own for all of them."""
    invariant = operators("triton", Path(), batch_invariant=True)
    case = paged.Case(
        new=[1, 66, 17], before=[130, 64, 0], heads=(2, 1), dim=32, window=window, sinks=bool(window)
    )
    layer = paged.Layer(case)
    together = layer.run(invariant)
    assert relative_error(together, layer.wanted()) < layer.limit()
    for row, start, count in ((0, 0, 1), (1, 0, 1), (1, 1, 40), (1, 63, 3), (1, 65, 1), (2, 16, 1)):
        rows, first = layer.step([count], [case.before[row] + start], [row]), case.starts[row] + start
        picked = slice(first, first + count)
        assert same_bits(layer.run(invariant, rows, picked), together[picked])
    gate_THD = random(torch.Generator().manual_seed(1), 84, 2, 32).bfloat16()
    rows = layer.step([1], [case.before[1] + 65], [1])
    whole, alone = (
        invariant.gated_attention(q_THD, layer.cache, of, window, layer.sinks_H, gate)
        for q_THD, of, gate in (
            (layer.q_THD, layer.rows, gate_THD), (layer.q_THD[66:67], rows, gate_THD[66:67])
        )
    )  # fmt: skip
    assert same_bits(alone, whole[66:67])


@pytest.mark.parametrize("operator", ["gated_delta", "mamba2"])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
def test_recurrence_has_the_same_bits_and_states_however_a_row_is_cut(
    operator: recurrences.Operator, states: torch.dtype
) -> None:
    invariant = operators("triton", Path(), batch_invariant=True)
    case = recurrences.Case(
        operator=operator,
        new=[1, 90],
        read=[0, 1],
        writes=[[3], [4]],
        dtype=torch.bfloat16,
        state_dtype=states,
    )
    whole, cut = recurrences.Layer(case), recurrences.Layer(case)
    together = whole.run(invariant)
    found, start = [cut.run(invariant, step([1], read=[0], writes=[[3]]), slice(1))], 1
    for count in (37, 52, 1):
        rows = step([count], read=[1], writes=[[4 if start + count == 91 else 1]])
        found.append(cut.run(invariant, rows, slice(start, start + count)))
        start += count
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[3:5], whole.state[3:5])
