"""Compiles and calls `kernels.cpp`: each operator as a differentiable function of CPU float32 tensors.

Training only. PyTorch's own chunked gated delta rule is far too slow on a CPU to train with.
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import softplus

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffast-math",
    "-fopenmp-simd",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)
HEAD_DIM = 32
CHUNK_TOKENS = 32
Context = Any  # autograd's contexts take any attribute


def compile_kernels(folder: Path) -> Path:
    """Builds the shared library in `folder` for this machine's processor and returns its path."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("training the keeper needs g++: install it and run again")
    compiled, library = folder / "kernels.o", folder / "kernels.so"
    # Two steps: linking with -ffast-math would make the whole process flush denormal numbers.
    for command in (
        [compiler, *FLAGS, "-fPIC", "-c", str(SOURCE), "-o", str(compiled)],
        [compiler, "-shared", str(compiled), "-o", str(library)],
    ):
        subprocess.run(command, check=True)
    return library


@dataclass(frozen=True)
class Heads:
    """Head counts of a linear-attention layer, whose projected rows are q|k|v|z|beta|decay."""

    keys: int
    values: int

    @property
    def conv_columns(self) -> int:
        return (2 * self.keys + self.values) * HEAD_DIM

    @property
    def gate_column(self) -> int:
        return self.conv_columns + self.values * HEAD_DIM


class Kernels:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, tensors: Sequence[Tensor | tuple[Tensor, int]], sizes: Sequence[int]) -> None:
        """Runs a kernel; an argument (tensor, column) starts at that column of the first row."""
        pointers = [_pointer(argument) for argument in tensors]
        getattr(self.library, name)(*pointers, *(ctypes.c_int64(size) for size in sizes))

    def norm(self, x: Tensor, weight_D: Tensor) -> Tensor:
        """x / rms(x) * (1 + weight) over the last dimension."""
        return cast("Tensor", cast("Any", _Norm).apply(self, x.contiguous(), weight_D))

    def swiglu(self, x_TF2: Tensor) -> Tensor:
        """silu(gate) * up of rows gate|up."""
        return cast("Tensor", cast("Any", _Swiglu).apply(self, x_TF2.contiguous()))

    def mixer(self, x_BTX: Tensor, weights: "MixerWeights", heads: Heads, reset_BT: Tensor) -> Tensor:
        """Convolution, gated delta rule and gated norm of projected rows -> [B, T, V * HEAD_DIM].

        `reset_BT` is added to the logarithm of the decay: a large negative entry makes a token start from no
        state.
        """
        operands = (weights.conv, weights.log_a, weights.dt_bias, weights.norm)
        return cast("Tensor", cast("Any", _Mixer).apply(self, x_BTX, *operands, heads, reset_BT))


@dataclass(frozen=True)
class MixerWeights:
    """conv [C, 4], log_a [H], dt_bias [H], norm [HEAD_DIM]."""

    conv: Tensor
    log_a: Tensor
    dt_bias: Tensor
    norm: Tensor


def _pointer(argument: Tensor | tuple[Tensor, int]) -> ctypes.c_void_p:
    tensor, column = argument if isinstance(argument, tuple) else (argument, 0)
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    return ctypes.c_void_p(tensor.data_ptr() + column * tensor.element_size())


class _Norm(Function):
    @staticmethod
    def forward(ctx: Context, kernels: Kernels, x: Tensor, weight: Tensor) -> Tensor:
        columns = x.shape[-1]
        rows = x.numel() // columns
        y, scale = torch.empty_like(x), torch.empty(rows)
        kernels.call("norm_forward", (x, weight, y, scale), (rows, columns))
        ctx.save_for_backward(x, weight, scale)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        sizes = (x.numel() // x.shape[-1], x.shape[-1])
        ctx.kernels.call("norm_backward", (x, weight, scale, grads[0].contiguous(), d_x, d_weight), sizes)
        return None, d_x, d_weight


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Context, kernels: Kernels, x: Tensor) -> Tensor:
        columns = x.shape[-1] // 2
        y = torch.empty(*x.shape[:-1], columns)
        kernels.call("swiglu_forward", (x, y), (y.numel() // columns, columns))
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        columns = x.shape[-1] // 2
        d_x = torch.empty_like(x)
        sizes = (x.numel() // (2 * columns), columns)
        ctx.kernels.call("swiglu_backward", (x, grads[0].contiguous(), d_x), sizes)
        return None, d_x


class _Mixer(Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 (autograd sees only the tensors that are arguments of their own)
        ctx: Context,
        kernels: Kernels,
        x_BTX: Tensor,
        conv_C4: Tensor,
        log_a_H: Tensor,
        dt_bias_H: Tensor,
        norm_D: Tensor,
        heads: Heads,
        reset_BT: Tensor,
    ) -> Tensor:
        batch, length, stride = x_BTX.shape
        gate = heads.gate_column
        beta = x_BTX[..., gate : gate + heads.values].sigmoid().contiguous()
        own_decay = -log_a_H.exp() * softplus(x_BTX[..., gate + heads.values :] + dt_bias_H)
        log_decay = (own_decay + reset_BT[..., None]).contiguous()
        mixed = torch.empty(batch, length, heads.conv_columns)
        kernels.call("conv_forward", (x_BTX, conv_C4, mixed), (stride, *mixed.shape))
        out = torch.empty(batch, length, heads.values, HEAD_DIM)
        kept = torch.empty(batch, heads.values, -(-length // CHUNK_TOKENS), HEAD_DIM, HEAD_DIM)
        sizes = (batch, length, heads.keys, heads.values, CHUNK_TOKENS)
        kernels.call("delta_forward", (mixed, log_decay, beta, out, kept), sizes)
        y = torch.empty(batch, length, heads.values * HEAD_DIM)
        scale = torch.empty(batch * length * heads.values)
        z = (x_BTX, heads.conv_columns)
        kernels.call("gated_norm_forward", (out, z, norm_D, y, scale), (stride, batch * length, heads.values))
        ctx.save_for_backward(
            x_BTX, conv_C4, log_a_H, dt_bias_H, norm_D, mixed, beta, log_decay, own_decay, kept, out, scale
        )
        ctx.kernels, ctx.heads = kernels, heads
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        x, conv, log_a, dt_bias, norm, mixed, beta, log_decay, own_decay, kept, out, scale = ctx.saved_tensors
        kernels: Kernels = ctx.kernels
        heads: Heads = ctx.heads
        batch, length, stride = x.shape
        d_x, d_out, d_norm = torch.empty_like(x), torch.empty_like(out), torch.empty_like(norm)
        z, d_z = (x, heads.conv_columns), (d_x, heads.conv_columns)
        kernels.call(
            "gated_norm_backward",
            (out, z, norm, scale, grads[0].contiguous(), d_out, d_z, d_norm),
            (stride, batch * length, heads.values),
        )
        d_mixed, d_decay, d_beta = torch.zeros_like(mixed), torch.empty_like(beta), torch.empty_like(beta)
        sizes = (batch, length, heads.keys, heads.values, CHUNK_TOKENS)
        kernels.call("delta_backward", (mixed, log_decay, beta, kept, d_out, d_mixed, d_decay, d_beta), sizes)
        d_conv = torch.empty_like(conv)
        kernels.call("conv_backward", (x, conv, d_mixed, d_x, d_conv), (stride, *mixed.shape))
        gate = heads.gate_column
        d_dt = -d_decay * log_a.exp() * torch.sigmoid(x[..., gate + heads.values :] + dt_bias)
        d_x[..., gate : gate + heads.values] = d_beta * beta * (1 - beta)
        d_x[..., gate + heads.values :] = d_dt
        d_log_a = (d_decay * own_decay).sum((0, 1))
        return None, d_x, d_conv, d_log_a, d_dt.sum((0, 1)), d_norm, None, None
