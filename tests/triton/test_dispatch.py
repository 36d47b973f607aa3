"""The operators that `dispatch` returns for CUDA memory, its table, and its errors."""

from inspect import signature
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import random, relative_error
from tidemill.kernels import dispatch
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.shared.build import KernelUnavailable


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU variants take longer to compile than these tests."""

    def refused(_: Path) -> None:
        raise KernelUnavailable("no compiler")

    monkeypatch.setattr(dispatch, "build", refused)


def test_every_operator_has_a_variant_of_the_same_signature(tmp_path: Path) -> None:
    found = dispatch.operators("triton", tmp_path)
    for name in dispatch.NAMES:
        ours, wanted = (getattr(ops, name) for ops in (found, dispatch.REFERENCE))
        assert (ours is wanted) == (name == "rope_angles"), "torch's on any device, once a step"
        parameters = [*signature(wanted).parameters]
        if "compute_dtype" in parameters:  # of CPUs alone
            parameters.remove("compute_dtype")
        more = ["batch_invariant"] if name in dispatch.INVARIANT else []
        assert [*signature(ours).parameters] == parameters + more


@pytest.mark.usefixtures("no_compiler")
def test_table_has_a_variant_for_each_operator(kernel_cache: Path) -> None:
    *lines, problem = dispatch.table(kernel_cache).splitlines()[1:]
    assert [line.split() for line in lines] == [
        [name, "yes", "yes", "missing", "yes"] for name in dispatch.NAMES
    ]
    assert problem == "no compiler"


@pytest.mark.usefixtures("no_compiler")
def test_without_triton_the_fix_is_named(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    with pytest.raises(KernelUnavailable, match=r"no triton .* pip install"):
        dispatch.operators("triton", kernel_cache)
    *lines, _, problem = dispatch.table(kernel_cache).splitlines()[1:]
    assert "pip install" in problem
    assert all(line.split()[1:] == ["yes", "yes", "missing", "missing"] for line in lines)


@pytest.mark.usefixtures("no_compiler")
def test_operator_without_a_variant_raises(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other variant replaces it; the table still lists the others."""
    monkeypatch.setitem(dispatch.FOLDERS, "silu_mul", "moe")
    monkeypatch.setitem(dispatch.FOLDERS, "linear", "moe")
    with pytest.raises(KernelUnavailable, match="linear has no variant for CUDA memory: use --kernels"):
        dispatch.operators("triton", kernel_cache)
    lines = [line.split() for line in dispatch.table(kernel_cache).splitlines()[1:]]
    assert [line[0] for line in lines if line[4:] == ["missing"]] == ["linear", "silu_mul"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_take_any_two_types(dtype: torch.dtype, *, has_bias: bool, tmp_path: Path) -> None:
    """The result has the dtype of the weights, logits are float32; float16 is widened."""
    ops, draw = dispatch.operators("triton", tmp_path), torch.Generator().manual_seed(0)
    kept, limit = (dtype, 1e-2) if dtype == torch.bfloat16 else (torch.float32, 1e-5)
    x_THI, weight_HOI = random(draw, 5, 3, 303)[..., 3:], random(draw, 3, 7, 300).to(dtype)
    bias = random(draw, 7).to(kept) if has_bias else None
    weight = ops.pack([plain(weight_HOI[0])], bias)
    half_THI = x_THI.to(kept)
    wide = weight_HOI.double()
    for call, x_TI, of, most in (
        (ops.linear, x_THI[:, 0], kept, limit),
        (ops.logits, half_THI[:, 0], torch.float32, 1e-5),
    ):
        y = call(x_TI, weight)
        wanted = torch.nn.functional.linear(x_TI.double(), wide[0], None if bias is None else bias.double())
        assert y.dtype == of
        assert relative_error(y, wanted) < most
    y_THO = ops.linear_heads(half_THI, ops.pack([plain(weight_HOI)], None))
    assert (y_THO.dtype, y_THO.shape) == (kept, (5, 3, 7))
    assert y_THO.is_contiguous()
    assert relative_error(y_THO, torch.einsum("thi,hoi->tho", half_THI.double(), wide)) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed_keeps_the_type(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = random(torch.Generator().manual_seed(0), 7, 5).to(dtype)
    found = dispatch.operators("triton", tmp_path).embed(torch.tensor([3, 0, 6, 3]), plain(weight))
    assert found.dtype == dtype
    assert torch.equal(found, weight[[3, 0, 6, 3]])
