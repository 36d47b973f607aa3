"""The blocks of GGUF files as codes with scales and offsets, each with exactly the values of ggml.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Numbers of 4 bits are in halves: the
first half of a group is in the low bits of its bytes, the second in the high bits.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch

from tidemill.kernels.linear.stored import CodeKind, Stored, plain
from tidemill.workers.models.errors import ModelError

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and offsets of blocks, `[.., B, n]` each."""


def stored_of(kind: str, rows: torch.Tensor, name: str) -> Stored:
    """Return the weights of rows of blocks, uint8 `[.., N, bytes]`. Raises ModelError for a kind that is not
    read."""
    if kind not in KINDS:
        return _widened(kind, rows, name)
    block_bytes, code_kind, parts = KINDS[kind]
    codes, scales, offsets = parts(_in_rows(rows, rows.shape[-1] // block_bytes))
    offsets = None if offsets is None else offsets.flatten(-2)
    return Stored(codes.flatten(-2), code_kind, scales.flatten(-2), offsets)


def _in_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:-1], rows, tensor.shape[-1] // rows)


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the two bytes from `start` on as a number, float32 `[.., B, 1]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _packed(quants: torch.Tensor) -> torch.Tensor:
    """Reorder numbers of 4 bits, `[.., n]` bytes of which hold a group, so that a byte holds neighbours."""
    first, second = quants[..., 0::2], quants[..., 1::2]
    low, high = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    return torch.cat([low, high], -1)


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    """Return the numbers of 4 bits of groups of n bytes, `[.., 2, n]`."""
    return torch.stack([quants & 15, quants >> 4], -2)


def _bits(quants: torch.Tensor, shifts: range, mask: int) -> torch.Tensor:
    """Return the bits of `[.., n]` at each shift, `[.., shifts, n]`."""
    return (quants[..., None, :] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    return (codes.to(torch.int8) - zero).flatten(-2)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _packed(blocks[..., 2:]), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _packed(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the numbers of 5 bits whose highest ones are in four bytes from `start` on, `[.., 2, 16]`."""
    bits = _bits(blocks[..., start : start + 4], range(8), 1).mT.flatten(-2)
    return _nibbles(blocks[..., start + 4 :]) | _in_rows(bits, 2) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _signed(_fifth_bits(blocks, 2), 16), _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _signed(_fifth_bits(blocks, 4), 0), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _scales_6(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of eight groups, whose factors of 6 bits are in bytes 4 to 16."""
    first, second, both = _in_rows(blocks[..., 4:16], 3).unbind(-2)
    scales = torch.cat([first & 63, (both & 15) | (first >> 6) << 4], -1)
    offsets = torch.cat([second & 63, (both >> 4) | (second >> 6) << 4], -1)
    return _halves(blocks, 0) * scales.float(), -(_halves(blocks, 2) * offsets.float())


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _packed(_in_rows(blocks[..., 16:], 4)).flatten(-2), *_scales_6(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(_in_rows(blocks[..., 48:], 4)).flatten(-3, -2)
    return _signed(numbers | _bits(blocks[..., 16:48], range(8), 1) << 4, 0), *_scales_6(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _in_rows(_nibbles(_in_rows(blocks[..., :128], 2)), 2).flatten(-3, -2)
    high = _bits(_in_rows(blocks[..., 128:192], 2), range(0, 8, 2), 3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _signed(low | high << 4, 32).flatten(-2), _halves(blocks, 208) * scales, None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    scales = blocks[..., :1].contiguous().view(torch.float8_e8m0fnu).float()
    return _packed(blocks[..., 1:]), scales, None


KINDS: dict[str, tuple[int, CodeKind, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": (18, "int4", _q4_0),
    "Q4_1": (20, "uint4", _q4_1),
    "Q5_0": (22, "int8", _q5_0),
    "Q5_1": (24, "int8", _q5_1),
    "Q8_0": (34, "int8", _q8_0),
    "Q4_K": (144, "uint4", _q4_k),
    "Q5_K": (176, "int8", _q5_k),
    "Q6_K": (210, "int8", _q6_k),
    "MXFP4": (17, "fp4", _mxfp4),
}
"""The bytes of a block, and the kind of its codes."""


def _widened(kind: str, rows: torch.Tensor, name: str) -> Stored:
    """Return the weights of a kind that has no codes of equal distance, in bfloat16. Raises ModelError."""
    try:
        gguf: Any = import_module("gguf")
        values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    except (ImportError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"tensor {name} is {kind}: pip install 'tidemill[gguf]' to widen it to bfloat16, or take a "
            f"file of the kinds {', '.join(KINDS)}"
        ) from error
    return plain(torch.as_tensor(values).bfloat16())
