"""Pages of FP8: a number is a code of e4m3 times a power of two, the scale of its token or of its layer.

Other scales would not make the numbers finer, as codes are floating point. With these, each number is a
bfloat16: every variant multiplies exactly the numbers of the definition, in any type.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BIAS = 127
"""The difference of a scale in its byte from its exponent, as in E8M0."""

SCALE_MIN, SCALE_MAX = 16, 246
"""The bytes of scales. All numbers with them are finite, and none is denormal in bfloat16."""

CODE_MAX = 448.0


class Fp8(NamedTuple):
    """The pages of one layer.

    codes    uint8 [pages, kv_heads, 2, P, D], strided, e4m3 (of torch.float8_e4m3fn)
    scales   uint8 [pages, kv_heads, 2, P], strided: a number is code * 2^(scale - BIAS). Those of a layer are
             fixed, one for keys and one for values, with strides of 0 else; those of tokens are written
             beside their codes
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds the numbers exactly."""
        return torch.bfloat16

    @property
    def is_fixed(self) -> bool:
        return self.scales.stride(0) == 0

    @property
    def is_beside(self) -> bool:
        """Return whether the scales of a page lie as its codes do, those of tokens side by side."""
        wanted = (*self.codes.stride()[:3], 1)
        both = zip(self.scales.shape, self.scales.stride(), wanted, strict=True)
        return all(size == 1 or stride == other for size, stride, other in both)


Pages = Tensor | Fp8
"""The keys and values of one layer, or its latents: [pages, kv_heads, 2 or 1, P, D], strided."""


def fixed_scales(codes: Tensor, key: int = BIAS, value: int = BIAS) -> Fp8:
    """Return the pages of a layer with these two scales."""
    pages, heads, parts, page_tokens, _ = codes.shape
    both = torch.tensor([key, value], dtype=torch.uint8, device=codes.device)
    return Fp8(codes, both.as_strided((pages, heads, parts, page_tokens), (0, 0, 1, 0)))


def scale_of(highest: Tensor) -> Tensor:
    """Return the least scale, uint8, with which no code of these float32 magnitudes is beyond CODE_MAX."""
    bits = highest.float().contiguous().view(torch.int32).clamp(max=0x7F800000)  # NaN as infinity
    return (((bits + 0x1FFFFF) >> 23) - 8).clamp(SCALE_MIN, SCALE_MAX).to(torch.uint8)


def encode(x_ND: Tensor, scales_N: Tensor) -> Tensor:
    """Return the nearest codes, ties to even; what is beyond the largest becomes it, and NaN stays NaN."""
    scaled_ND = x_ND.float() * _power(2 * BIAS - scales_N.int())[..., None]
    return scaled_ND.clamp(-CODE_MAX, CODE_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes_ND: Tensor, scales_N: Tensor) -> Tensor:
    """Return the numbers in float32."""
    return codes_ND.view(torch.float8_e4m3fn).float() * _power(scales_N.int())[..., None]


def _power(scales: Tensor) -> Tensor:
    return (scales << 23).view(torch.float32)
