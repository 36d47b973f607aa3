"""`linear` and its kin on CPU: weights packed once into panels; an output is a sum in index order."""

from collections.abc import Callable, Sequence

import torch

from tidemill.kernels.activation.cpu import bind_silu_mul
from tidemill.kernels.linear.packed import Packed, in_segments
from tidemill.kernels.linear.reference import COLUMNS_MAX
from tidemill.kernels.linear.stored import Kind, Stored
from tidemill.kernels.shared.arguments import address_or_null
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.huge_pages import HugePages

FLOATS, WIDENED, PAIRS, INTEGERS = range(4)  # of cpu.h
CODES: dict[Kind, int] = {"int8": 1, "fp8": 2, "int4": 3, "uint4": 4, "fp4": 5}
BLOCK = 32  # elements of depth that PAIRS are padded to
UNIT = 4  # elements of depth that are decoded together
SMALLEST, LARGEST = 2.0**-90, 2.0**90
"""Bounds of scales and offsets: no value is denormal, or infinite."""


def type_into(weight: Packed) -> torch.dtype:
    """Return the type that a product takes without another copy of its rows."""
    return torch.bfloat16 if weight.rounds and weight.in_features % BLOCK == 0 else torch.float32


def is_kept(part: Stored) -> bool:
    """Return whether products take these codes as they are: but for `w8a8`, with the bits of their values."""
    if part.kind == "w8a8":
        return True
    if part.scales is None or (part.group % UNIT and part.scales.shape[-1] > 1):
        return False
    return _is_moderate(part.scales) and (part.offsets is None or _is_moderate(part.offsets))


def _is_moderate(values: torch.Tensor) -> bool:
    size = values.abs()
    return bool(((size == 0) | (size >= SMALLEST) & (size <= LARGEST)).all())


def bind_pack(
    library: Library, compute_dtype: ComputeDtype
) -> Callable[[Sequence[Stored], torch.Tensor | None], Packed]:
    """Codes that are kept have the products of their `factors`, decoded block by block."""
    pack_floats, pack_codes = library.function("linear_pack"), library.function("linear_pack_codes")
    codes_bytes, panel = library.function("linear_codes_bytes"), library.function("linear_panel")()
    assert panel is not None
    memory = HugePages()

    def pack(parts: Sequence[Stored], bias_N: torch.Tensor | None = None) -> Packed:
        bias_N = None if bias_N is None else bias_N.float()
        rounds = compute_dtype == "bfloat16"
        kinds = {part.kind for part in parts}
        if rounds and "float32" in kinds and "w8a8" not in kinds:
            return floats(torch.cat([part.factors(compute_dtype) for part in parts], -2), bias_N)

        def of_one_kind(run: Stored, bias: torch.Tensor | None) -> Packed:
            return codes(run, bias) if is_kept(run) else floats(run.factors(compute_dtype), bias)

        return in_segments(parts, bias_N, of_one_kind)

    def floats(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Packed:
        *experts, n, k = weight_NK.shape
        is_half = weight_NK.dtype == torch.bfloat16
        rounds = is_half and compute_dtype == "bfloat16"
        weight_ENK = (weight_NK if is_half else weight_NK.float()).contiguous().view(-1, n, k)
        depth = -(-k // BLOCK) * BLOCK if rounds else k
        data = memory.empty(len(weight_ENK), -(-n // panel), depth, panel, dtype=weight_ENK.dtype)
        format_ = PAIRS if rounds else WIDENED if is_half else FLOATS
        for source, target in zip(weight_ENK, data, strict=True):
            pack_floats(source.data_ptr(), target.data_ptr(), format_, n, k)
        bias = None if bias_N is None else bias_N.contiguous()
        kind: Kind = "bfloat16" if is_half else "float32"
        return Packed(data.view(*experts, *data.shape[1:]), bias, n, k, rounds, kind, format=format_)

    def codes(given: Stored, bias_N: torch.Tensor | None) -> Packed:
        assert given.scales is not None
        *experts, n, _ = given.codes.shape
        k, rounds, groups = given.columns, compute_dtype == "bfloat16", given.scales.shape[-1]
        if given.kind == "w8a8":
            format_, rounds = INTEGERS, False
            assert groups == 1
            assert given.offsets is None
            assert k <= COLUMNS_MAX
        else:
            fields = PAIRS if rounds else FLOATS, CODES[given.kind] << 2, (given.offsets is not None) << 5
            format_ = sum(fields) | (given.group << 6 if groups > 1 else 0)
        codes_ENC = given.codes.contiguous().view(-1, n, given.codes.shape[-1])
        scales_ENG, offsets_ENG = (
            None if part is None else part.float().contiguous().view(-1, n, groups)
            for part in (given.scales, given.offsets)
        )
        num_bytes = codes_bytes(format_, n, k)
        assert num_bytes is not None
        assert scales_ENG is not None
        data = memory.empty(len(codes_ENC), num_bytes, dtype=torch.uint8)
        for e, target in enumerate(data):
            pack_codes(
                codes_ENC[e].data_ptr(), scales_ENG[e].data_ptr(),
                None if offsets_ENG is None else offsets_ENG[e].data_ptr(),
                target.data_ptr(), format_, n, k,
            )  # fmt: skip
        bias = None if bias_N is None else bias_N.contiguous()
        return Packed(data.view(*experts, num_bytes), bias, n, k, rounds, given.kind, format=format_)

    return pack


def bind_linear(library: Library) -> Callable[[torch.Tensor, Packed], torch.Tensor]:
    call = library.function("linear")

    def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
        m, k = x_MK.shape
        assert k == weight.in_features
        halves = x_MK.dtype == torch.bfloat16
        assert halves <= weight.rounds
        assert halves or x_MK.dtype == torch.float32
        assert x_MK.stride(1) == 1
        segments = weight.segments
        y_MN = x_MK.new_empty(m, sum(part.out_features for part in segments), dtype=torch.float32)
        column = 0
        for part in segments:
            n = part.out_features
            call(
                x_MK.data_ptr(), x_MK.stride(0), halves, part.data.data_ptr(), part.format,
                address_or_null(part.bias_N, n),
                y_MN.data_ptr() + column * y_MN.element_size(), y_MN.stride(0), m, n, k,
            )  # fmt: skip
            column += n
        return y_MN

    return linear


bind_logits = bind_linear  # products are in float32 here


def bind_linear_silu(library: Library) -> Callable[[torch.Tensor, Packed, Packed], torch.Tensor]:
    call = library.function("linear_silu")
    linear, silu_mul = bind_linear(library), bind_silu_mul(library)

    def linear_silu(x_MK: torch.Tensor, gate_up: Packed, into: Packed) -> torch.Tensor:
        (m, k), inner = x_MK.shape, gate_up.out_features // 2
        assert k == gate_up.in_features
        assert x_MK.dtype == torch.float32
        assert x_MK.stride(1) == 1
        if gate_up.rest is not None:
            return silu_mul(linear(x_MK, gate_up))
        dtype = type_into(into)
        # Rows a power of 2 apart would share few sets of L1.
        y_MI = x_MK.new_empty(m, inner + BLOCK, dtype=dtype)[:, :inner]
        call(
            x_MK.data_ptr(), x_MK.stride(0), gate_up.data.data_ptr(), gate_up.format,
            address_or_null(gate_up.bias_N, gate_up.out_features),
            y_MI.data_ptr(), y_MI.stride(0), dtype == torch.bfloat16, m, inner, k,
        )  # fmt: skip
        return y_MI

    return linear_silu


def bind_linear_heads(library: Library) -> Callable[[torch.Tensor, Packed], torch.Tensor]:
    call = library.function("linear_heads")

    def linear_heads(x_THI: torch.Tensor, weight: Packed) -> torch.Tensor:
        tokens, heads, width = x_THI.shape
        data = weight.data
        assert weight.bias_N is None
        assert weight.rest is None
        assert (heads, width) == (len(data), weight.in_features)
        assert x_THI.dtype == torch.float32
        assert x_THI.stride(2) == 1
        y_THO = x_THI.new_empty(tokens, heads, weight.out_features)
        call(
            x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1),
            data.data_ptr(), data.stride(0) * data.element_size(), weight.format,
            y_THO.data_ptr(), tokens, heads, weight.out_features, width,
        )  # fmt: skip
        return y_THO

    return linear_heads
