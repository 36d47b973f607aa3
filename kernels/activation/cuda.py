# pyrefly: ignore-errors[bad-argument-type]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`silu_mul` and `sigmoid_mul` on CUDA."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of one program


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def silu_mul_part(gate_up, gate_up_row, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Row i, part j of a grid (i, j)."""
    row = tl.program_id(0).to(tl.int64)
    at_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_I = at_I < WIDTH
    gate_up += row * gate_up_row
    gate_I = tl.load(gate_up + at_I, mask=in_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up + WIDTH + at_I, mask=in_I, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + at_I, gate_I * sigmoid(gate_I) * up_I, mask=in_I)


@triton.jit
def sigmoid_mul_part(
    x, x_token, x_head, gate, gate_token, gate_head, gate_element, y,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Token i, part j of a grid (i, j)."""
    token = tl.program_id(0).to(tl.int64)
    at_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_I = at_I < HEADS * WIDTH
    head_I, element_I = at_I // WIDTH, at_I % WIDTH
    x_I = tl.load(x + token * x_token + head_I * x_head + element_I, mask=in_I, other=0.0).to(tl.float32)
    gate_at = gate + token * gate_token + head_I * gate_head + element_I * gate_element
    gate_I = tl.load(gate_at, mask=in_I, other=0.0).to(tl.float32)
    tl.store(y + token * HEADS * WIDTH + at_I, x_I * sigmoid(gate_I), mask=in_I)


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    assert gate_up_T2I.stride(1) == 1
    y_TI = gate_up_T2I.new_empty(tokens, width)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(width))
        silu_mul_part[(tokens, triton.cdiv(width, block))](
            gate_up_T2I, gate_up_T2I.stride(0), y_TI, WIDTH=width, BLOCK=block
        )
    return y_TI


def sigmoid_mul(x_THD: torch.Tensor, gate_THD: torch.Tensor) -> torch.Tensor:
    """The gate may be expanded over any dimension."""
    tokens, heads, width = x_THD.shape
    token_stride, head_stride, element_stride = x_THD.stride()
    gate_token, gate_head, gate_element = gate_THD.stride()
    assert gate_THD.shape == x_THD.shape
    assert element_stride == 1
    y_TI = x_THD.new_empty(tokens, heads * width)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(heads * width))
        sigmoid_mul_part[(tokens, triton.cdiv(heads * width, block))](
            x_THD, token_stride, head_stride, gate_THD, gate_token, gate_head, gate_element, y_TI,
            HEADS=heads, WIDTH=width, BLOCK=block,
        )  # fmt: skip
    return y_TI
