"""Tensors as quantised checkpoints hold them, beside the values that their formats define."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file

from tidemill.kernels.linear.stored import Kind
from tidemill.workers.models.architectures.registry import no_progress
from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.sharding import Replicated
from tidemill.workers.models.loading.weights import Weight

Tensors = dict[str, torch.Tensor]
NAME = "layer.weight"
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 3]}
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class Case(NamedTuple):
    """A tensor as a folder holds it, as float32 arithmetic on its definition has it, and the kind it is read
    as: bfloat16 if it is widened."""

    config: dict[str, Any]
    shape: tuple[int, ...]
    stored: Tensors
    wanted: torch.Tensor
    kind: Kind = "bfloat16"


def packed(config_group: dict[str, Any], kind: str = "pack-quantized") -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": config_group}},
    }


def whole_number(draw: torch.Generator, *shape: int, bits: int = 8) -> torch.Tensor:
    return torch.randint(-(1 << bits - 1), 1 << bits - 1, shape, generator=draw)


def positive(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=draw) + 0.01


def in_blocks(scale: torch.Tensor, columns: int) -> torch.Tensor:
    return scale.float().repeat_interleave(columns, -1)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of `[R, n]` signed integers in int32, the first in the lowest bits, as Python's integers do it."""
    per_word = 32 // bits
    rows: list[list[int]] = []
    for row in cast("list[list[int]]", values.tolist()):
        numbers = [value + (1 << bits - 1) for value in row] + [0] * (-len(row) % per_word)
        found = [
            sum(number << bits * index for index, number in enumerate(numbers[at : at + per_word]))
            for at in range(0, len(numbers), per_word)
        ]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in found])
    return torch.tensor(rows, dtype=torch.int32)


def fp8_in_blocks(draw: torch.Generator) -> Case:
    weight = torch.randn(10, 7, generator=draw).mul(40).to(torch.float8_e4m3fn)
    scale = positive(draw, 3, 3)
    wanted = weight.float() * scale.repeat_interleave(4, 0)[:10].repeat_interleave(3, 1)[:, :7]
    return Case(FP8_BLOCKS, (10, 7), {NAME: weight, f"{NAME}_scale_inv": scale}, wanted)


def fp8_in_blocks_of_experts(draw: torch.Generator) -> Case:
    weight = torch.randn(2, 8, 6, generator=draw).to(torch.float8_e4m3fn)
    scale = positive(draw, 2, 2, 2)
    wanted = weight.float() * scale.repeat_interleave(4, 1).repeat_interleave(3, 2)
    return Case(FP8_BLOCKS, (2, 8, 6), {NAME: weight, f"{NAME}_scale_inv": scale}, wanted, "fp8")


def fp8_with_powers_of_two(draw: torch.Generator) -> Case:
    weight = torch.randn(4, 6, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25, 8.0]])
    wanted = weight.float() * scale.repeat_interleave(3, 1)
    stored = {NAME: weight, f"{NAME}_scale_inv": scale.to(torch.float8_e8m0fnu)}
    return Case(FP8_BLOCKS, (4, 6), stored, wanted, "fp8")


def fp8_of_a_tensor(draw: torch.Generator) -> Case:
    weight = torch.randn(5, 6, generator=draw).to(torch.float8_e5m2)
    stored = {NAME: weight, f"{NAME}_scale": torch.tensor(0.37), "layer.input_scale": torch.ones(1)}
    config = packed({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized")
    return Case(config, (5, 6), stored, weight.float() * torch.tensor(0.37))


def fp8_by_rows(draw: torch.Generator) -> Case:
    """Return a case whose scales are a row for the columns, not a column: 6 x 6 distinguishes them."""
    weight = torch.randn(6, 6, generator=draw).to(torch.float8_e4m3fn)
    scale = positive(draw, 6).bfloat16()
    config = packed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized")
    return Case(
        config, (6, 6), {NAME: weight, f"{NAME}_scale": scale}, weight.float() * scale[:, None].float(), "fp8"
    )


def int8_with_zeros(draw: torch.Generator) -> Case:
    weight, scale = whole_number(draw, 6, 5), positive(draw, 6, 1).bfloat16()
    zeros = whole_number(draw, 6, 1)
    stored = {
        NAME: weight.to(torch.int8),
        f"{NAME}_scale": scale,
        f"{NAME}_zero_point": zeros.to(torch.int8),
    }
    config = packed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized")
    return Case(config, (6, 5), stored, (weight - zeros) * scale, "int8")


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
"""The `input_activations` of INT8 with a scale for each token."""


def int8_with_int8_inputs(draw: torch.Generator) -> Case:
    weight, scale = whole_number(draw, 6, 5), positive(draw, 6, 1).bfloat16()
    config = packed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = DYNAMIC
    stored = {NAME: weight.to(torch.int8), f"{NAME}_scale": scale}
    return Case(config, (6, 5), stored, weight * scale.float(), "w8a8")


def packed_8_bits(draw: torch.Generator) -> Case:
    weight, scale = whole_number(draw, 7, 10), positive(draw, 7, 1).bfloat16()
    stored = {
        f"{NAME}_packed": words(weight, 8),
        f"{NAME}_scale": scale,
        "layer.weight_shape": torch.tensor([7, 10]),
    }
    config = packed({"num_bits": 8, "type": "int", "strategy": "channel"})
    return Case(config, (7, 10), stored, weight * scale.float(), "int8")


def packed_4_bits_in_groups(draw: torch.Generator) -> Case:
    weight, scale, zeros = (
        whole_number(draw, 9, 12, bits=4),
        positive(draw, 9, 3).half(),
        whole_number(draw, 9, 3, bits=4),
    )
    stored = {
        f"{NAME}_packed": words(weight, 4),
        f"{NAME}_scale": scale,
        f"{NAME}_zero_point": words(zeros.T, 4).T.contiguous(),
    }
    wanted = (weight - zeros.repeat_interleave(4, 1)) * in_blocks(scale, 4)
    return Case(
        packed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4}),
        (9, 12),
        stored,
        wanted,
        "int4",
    )


def packed_in_any_order(draw: torch.Generator) -> Case:
    weight, scale = whole_number(draw, 4, 8, bits=4), positive(draw, 4, 2)
    group_of = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.int32)
    stored = {f"{NAME}_packed": words(weight, 4), f"{NAME}_scale": scale, f"{NAME}_g_idx": group_of}
    config = packed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4})
    return Case(config, (4, 8), stored, weight * scale[:, group_of.long()])


def mxfp4(draw: torch.Generator) -> Case:
    """By groups of 32 along K: two values in a byte, the first in its lower half."""
    codes, wanted = fp4(draw, 3, 10, 64)
    powers = torch.randint(-20, 20, (3, 10, 2), generator=draw)
    stored = {f"{NAME}_blocks": codes.view(3, 10, 2, 16), f"{NAME}_scales": (powers + 127).to(torch.uint8)}
    return Case({"quant_method": "mxfp4"}, (3, 10, 64), stored, wanted * in_blocks(2.0**powers, 32), "fp4")


def mxfp4_packed(draw: torch.Generator) -> Case:
    codes, wanted = fp4(draw, 6, 64)
    powers = torch.randint(-20, 20, (6, 2), generator=draw)
    stored = {f"{NAME}_packed": codes, f"{NAME}_scale": (powers + 127).to(torch.uint8)}
    group = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    config = packed(group, "mxfp4-pack-quantized")
    return Case(config, (6, 64), stored, wanted * in_blocks(2.0**powers, 32), "fp4")


def mxfp8(draw: torch.Generator) -> Case:
    weight = torch.randn(6, 64, generator=draw).to(torch.float8_e4m3fn)
    powers = torch.randint(-20, 20, (6, 2), generator=draw)
    stored = {NAME: weight, f"{NAME}_scale": (powers + 127).to(torch.uint8)}
    return Case(
        {"quant_method": "modelopt"}, (6, 64), stored, weight.float() * in_blocks(2.0**powers, 32), "fp8"
    )


def nvfp4(draw: torch.Generator) -> Case:
    """The scale of a group is an e4m3 times a float32 of the tensor."""
    codes, wanted = fp4(draw, 6, 32)
    scale, factor = positive(draw, 6, 2).to(torch.float8_e4m3fn), torch.tensor(0.013)
    stored = {NAME: codes, f"{NAME}_scale": scale, f"{NAME}_scale_2": factor}
    return Case(
        {"quant_method": "modelopt"}, (6, 32), stored, wanted * in_blocks(scale.float() * factor, 16), "fp4"
    )


def nvfp4_packed(draw: torch.Generator) -> Case:
    """Like nvfp4, divided by the float32."""
    codes, wanted = fp4(draw, 6, 32)
    scale, divisor = positive(draw, 6, 2).to(torch.float8_e4m3fn), torch.tensor([83.0])
    stored = {f"{NAME}_packed": codes, f"{NAME}_scale": scale, f"{NAME}_global_scale": divisor}
    group = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = packed(group, "nvfp4-pack-quantized")
    return Case(config, (6, 32), stored, wanted * in_blocks(scale.float() / divisor, 16), "fp4")


def awq(draw: torch.Generator) -> Case:
    """Words are of 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
    numbers, zeros = (torch.randint(0, 16, shape, generator=draw) for shape in ((12, 16), (3, 16)))
    scale = positive(draw, 3, 16).half()
    woven = [8 * word + place for word in range(2) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    stored = {
        "layer.qweight": words(numbers[:, woven] - 8, 4),
        "layer.qzeros": words(zeros[:, woven] - 8, 4),
        "layer.scales": scale,
    }
    wanted = (numbers - zeros.repeat_interleave(4, 0)) * scale.float().repeat_interleave(4, 0)
    config = {"quant_method": "awq", "bits": 4, "group_size": 4, "version": "gemm", "zero_point": True}
    return Case(config, (16, 12), stored, wanted.T, "int4")


def gptq_of(
    draw: torch.Generator, *, bits: int = 4, form: str = "gptq", group_of: Sequence[int] = (), zero: int = -1
) -> Case:
    """Words are of inputs; zero points are in words of outputs, less 1 in the first form."""
    most, group_of = 1 << bits, group_of or [column // 8 for column in range(16)]
    numbers, zeros = (torch.randint(1, most, shape, generator=draw) for shape in ((16, 8), (2, 8)))
    if zero >= 0:
        zeros.fill_(zero)
    scale, lowered = positive(draw, 2, 8).half(), zeros - int(form == "gptq")
    stored = {
        "layer.qweight": words(numbers.T - most // 2, bits).T,
        "layer.qzeros": words(lowered - most // 2, bits),
        "layer.scales": scale,
        "layer.g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    wanted = (numbers - zeros[list(group_of)]) * scale.float()[list(group_of)]
    in_order = list(group_of) == sorted(group_of)
    kind: Kind = "bfloat16" if not in_order else "int4" if bits == 4 else "int8"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 8, "checkpoint_format": form}
    return Case(config, (8, 16), stored, wanted.T, kind)


def fp4(draw: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, two in a byte, and their numbers."""
    codes = torch.randint(0, 16, shape, generator=draw)
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), table[codes]


CASES: list[Callable[[torch.Generator], Case]] = [
    fp8_in_blocks,
    fp8_in_blocks_of_experts,
    fp8_with_powers_of_two,
    fp8_of_a_tensor,
    fp8_by_rows,
    int8_with_zeros,
    int8_with_int8_inputs,
    packed_8_bits,
    packed_4_bits_in_groups,
    packed_in_any_order,
    mxfp4,
    mxfp4_packed,
    mxfp8,
    nvfp4,
    nvfp4_packed,
    awq,
    gptq_of,
    partial(gptq_of, zero=8),
    partial(gptq_of, bits=8, form="gptq_v2"),
    partial(gptq_of, group_of=[0, 1] * 8),
]


def opened(folder: Path, case: Case) -> WeightsFolder:
    save_file(
        {name: tensor.contiguous() for name, tensor in case.stored.items()}, folder / "model.safetensors"
    )
    checkpoint = WeightsFolder(folder, no_progress, digests=True, quantization=case.config)
    checkpoint.check({NAME: Weight(case.shape, Replicated(), transposed=True)}, lambda _name: False)
    return checkpoint
