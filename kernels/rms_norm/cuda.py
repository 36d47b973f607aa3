# pyrefly: ignore-errors[bad-argument-type]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`add_norm`, `rms_norm` and `rms_norm_gated` on CUDA. How many rows a program takes depends on their width
alone, so no bit of a row depends on the others."""

import torch
import triton
import triton.language as tl

TILE = 1024  # elements of one program, unless one row has more
WARP_ELEMENTS = 512  # of a program, as long as it has 4 to 16 warps


@triton.jit
def normalised(x_RH, weight_H, epsilon, WIDTH: tl.constexpr):
    x_RH = x_RH.to(tl.float32)
    unit_R = tl.rsqrt(tl.sum(x_RH * x_RH, 1) / WIDTH + epsilon)
    return x_RH * unit_R[:, None] * weight_H.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows"])
def add_norm_rows(
    residual,  # float32 [T, H], or None
    branch,  # [T, H]
    weight,
    total,  # float32 [T, H], may be residual; None where branch is the sum
    y,  # [T, H]
    rows, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Rows [i ROWS, (i + 1) ROWS) of a grid (i,). A program has at least as many elements as threads: an
    element is read and written by one of them."""
    row_R, at_H = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    in_H = at_H < WIDTH
    in_RH = (row_R < rows)[:, None] & in_H[None, :]
    at_RH = row_R[:, None] * WIDTH + at_H[None, :]
    x_RH = tl.load(branch + at_RH, mask=in_RH, other=0.0).to(tl.float32)
    if residual is not None:
        x_RH = tl.load(residual + at_RH, mask=in_RH, other=0.0) + x_RH
    if total is not None:
        tl.store(total + at_RH, x_RH, mask=in_RH)
    y_RH = normalised(x_RH, tl.load(weight + at_H, mask=in_H, other=0.0), epsilon, WIDTH)
    tl.store(y + at_RH, y_RH, mask=in_RH)


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x, x_row, weight, y, rows, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Norm rows like `add_norm_rows`; rows of x are `x_row` elements apart."""
    row_R, at_H = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    in_H = at_H < WIDTH
    in_RH = (row_R < rows)[:, None] & in_H[None, :]
    x_RH = tl.load(x + row_R[:, None] * x_row + at_H[None, :], mask=in_RH, other=0.0)
    y_RH = normalised(x_RH, tl.load(weight + at_H, mask=in_H, other=0.0), epsilon, WIDTH)
    tl.store(y + row_R[:, None] * WIDTH + at_H[None, :], y_RH, mask=in_RH)


@triton.jit(do_not_specialize=["rows"])
def norm_gated_rows(
    x, gate, gate_token, gate_group, gate_head, weight, y, rows, epsilon,
    GROUPS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Norm rows like `add_norm_rows`; row (t GROUPS + g) HEADS + r is head r of group g of token t."""
    row_R, at_V = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    in_V = at_V < WIDTH
    in_RV = (row_R < rows)[:, None] & in_V[None, :]
    at_RV = row_R.to(tl.int64)[:, None] * WIDTH + at_V[None, :]
    gate_R = (
        (row_R // (GROUPS * HEADS)).to(tl.int64) * gate_token
        + row_R // HEADS % GROUPS * gate_group
        + row_R % HEADS * gate_head
    )
    gate_RV = tl.load(gate + gate_R[:, None] + at_V[None, :], mask=in_RV, other=0.0).to(tl.float32)
    x_RV = tl.load(x + at_RV, mask=in_RV, other=0.0)
    y_RV = normalised(x_RV, tl.load(weight + at_V, mask=in_V, other=0.0), epsilon, WIDTH)
    e_RV = tl.exp(-tl.abs(gate_RV))
    silu_RV = gate_RV * tl.where(gate_RV < 0, e_RV, 1.0) / (1 + e_RV)
    tl.store(y + at_RV, y_RV * silu_RV, mask=in_RV)


def add_norm(
    residual_TH: torch.Tensor | None, branch_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum takes the memory of residual, or of branch where that is the sum."""
    rows, width = branch_TH.shape
    assert branch_TH.is_contiguous()
    y_TH = torch.empty_like(branch_TH)
    if residual_TH is not None:
        assert residual_TH.shape == branch_TH.shape
        assert residual_TH.dtype == torch.float32
        assert residual_TH.is_contiguous()
        sum_TH = written = residual_TH
    elif branch_TH.dtype == torch.float32:
        sum_TH, written = branch_TH, None
    else:
        sum_TH = written = torch.empty_like(branch_TH, dtype=torch.float32)
    if rows:
        grid, sizes = launch(rows, width)
        add_norm_rows[grid](residual_TH, branch_TH, weight_H, written, y_TH, rows, epsilon, **sizes)
    return sum_TH, y_TH


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
    rows, width = x_TH.shape
    assert x_TH.stride(1) == 1
    y_TH = x_TH.new_empty(rows, width)
    if rows:
        grid, sizes = launch(rows, width)
        norm_rows[grid](x_TH, x_TH.stride(0), weight_H, y_TH, rows, epsilon, **sizes)
    return y_TH


def rms_norm_gated(
    x_TGRV: torch.Tensor, gate_TGRV: torch.Tensor, weight_V: torch.Tensor, epsilon: float
) -> torch.Tensor:
    tokens, groups, heads, width = x_TGRV.shape
    token_stride, group_stride, head_stride, element_stride = gate_TGRV.stride()
    assert gate_TGRV.shape == x_TGRV.shape
    assert x_TGRV.is_contiguous()
    assert element_stride == 1
    y_TI = x_TGRV.new_empty(tokens, groups * heads * width)
    if tokens:
        rows = tokens * groups * heads
        grid, sizes = launch(rows, width)
        norm_gated_rows[grid](
            x_TGRV, gate_TGRV, token_stride, group_stride, head_stride, weight_V, y_TI, rows, epsilon,
            GROUPS=groups, HEADS=heads, **sizes,
        )  # fmt: skip
    return y_TI


def launch(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    padded = 1 << (width - 1).bit_length()
    block = max(1, TILE // padded)
    warps = max(4, min(16, padded // WARP_ELEMENTS))
    return (-(-rows // block),), {"WIDTH": width, "PADDED": padded, "ROWS": block, "num_warps": warps}
