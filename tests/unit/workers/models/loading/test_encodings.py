"""Folders with quantised weights or experts apart: what is read of them, and errors that name tensors."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.workers.quantised import (
    DYNAMIC,
    FP8_BLOCKS,
    NAME,
    Case,
    Tensors,
    fp8_in_blocks,
    mxfp4,
    no_progress,
    opened,
    packed,
    packed_8_bits,
)
from tidemill.kernels.dispatch import REFERENCE
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored, join
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.qwen3 import parse_qwen3
from tidemill.workers.models.architectures.registry import LoadedModel, describe, load
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.encodings import Scheme, scheme_of
from tidemill.workers.models.loading.sharding import EvenRuns, Replicated, part_of
from tidemill.workers.models.loading.weights import Weight


def stacks(draw: torch.Generator) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Two experts of width 3 and 4 columns, one matrix quantised and the others not."""
    stored: Tensors = {}
    for expert in range(2):
        for name, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3))):
            key = f"mlp.experts.{expert}.{name}_proj.weight"
            stored[key] = torch.randn(shape, generator=draw).bfloat16()
    plain = {name.rpartition("experts.")[2]: tensor.float() for name, tensor in stored.items()}
    halved = "mlp.experts.1.up_proj.weight"
    codes = stored[halved].to(torch.float8_e4m3fn)
    stored |= {halved: codes, f"{halved}_scale_inv": torch.tensor([[0.5]])}
    plain["1.up_proj.weight"] = 0.5 * codes.float()
    into = torch.stack(
        [
            torch.cat([plain[f"{expert}.gate_proj.weight"], plain[f"{expert}.up_proj.weight"]])
            for expert in range(2)
        ]
    )
    return stored, into, torch.stack([plain[f"{expert}.down_proj.weight"] for expert in range(2)])


def test_experts_that_are_stored_apart_are_read_together(tmp_path: Path) -> None:
    """transformers stores them separately, where the architecture has them as one tensor."""
    stored, into, back = stacks(torch.Generator().manual_seed(0))
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = WeightsFolder(tmp_path, no_progress, digests=True, quantization={"quant_method": "fp8"})
    shapes = {"mlp.experts.gate_up_proj": (2, 6, 4), "mlp.experts.down_proj": (2, 4, 3)}
    weights = {name: Weight(shape, Replicated()) for name, shape in shapes.items()}
    checkpoint.check(weights, lambda _name: False)
    for size in (1, 2, 3):
        for index in range(size):
            for (name, shape), wanted, cut in zip(
                shapes.items(), (into, back), (EvenRuns(runs=2, dim=1), EvenRuns(dim=1)), strict=True
            ):
                part = part_of(cut, shape[1], index, size)
                rows = [wanted[:, start:end] for start, end in part.ranges]
                zeros = torch.zeros(2, part.zeros, shape[2])
                whole = torch.cat([half for row in rows for half in (row, zeros)], dim=1)
                assert torch.equal(checkpoint.read(name, part).widened.codes, whole.bfloat16())
    assert checkpoint.names == stored.keys()
    del stored["mlp.experts.1.gate_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = WeightsFolder(tmp_path, no_progress, digests=True, quantization={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"lacks tensor mlp\.experts\.1\.gate_proj\.weight"):
        checkpoint.check(weights, lambda _name: False)
    with pytest.raises(ModelError, match=r"lacks tensor mtp\.experts\.gate_up_proj"):
        checkpoint.check({"mtp.experts.gate_up_proj": Weight((2, 6, 4), Replicated())}, lambda _name: False)


def fp8_of(weight: torch.Tensor) -> Tensors:
    """Return what a quantiser makes, in blocks of 128 x 128: the largest value of a block becomes 448."""
    scale = weight.abs().max().view(1, 1) / 448
    return {"": (weight / scale).to(torch.float8_e4m3fn), "_scale_inv": scale}


def test_quantised_folder_is_the_model_that_its_values_are(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    draw = torch.Generator().manual_seed(0)
    plain: Tensors = {}
    quantised: Tensors = {}
    for name, weight in weights_of(parse_qwen3(config)).items():
        tensor = torch.randn(weight.shape, generator=draw).bfloat16()
        if "_proj" in name:
            codes = fp8_of(tensor.float())
            quantised |= {name + suffix: code for suffix, code in codes.items()}
            tensor = (codes[""].float() * codes["_scale_inv"]).bfloat16()
        plain[name] = tensor
        quantised.setdefault(name, tensor)
    folders = {"plain": plain, "quantised": quantised}
    for folder, tensors in folders.items():
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        more = blocks if folder == "quantised" else {}
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))

    def load_folder(folder: Path) -> tuple[LoadedModel, Tensors]:
        """The model, and every matrix as it came to be packed."""
        found: Tensors = {}

        def pack(parts: Sequence[Stored], bias: torch.Tensor | None) -> Packed:
            found[str(len(found))] = join(parts).widened.codes
            return REFERENCE.pack(parts, bias)

        return load(folder, replace(REFERENCE, pack=pack), no_progress), found

    model, wanted = load_folder(tmp_path / "plain")
    quantised_model, found = load_folder(tmp_path / "quantised")
    assert quantised_model.layers == model.layers == describe(tmp_path / "quantised")[0]
    assert len(found) == 5
    for index, tensor in wanted.items():
        assert torch.equal(found[index], tensor)
    assert quantised_model.fingerprint != model.fingerprint
    scale = quantised["model.layers.0.mlp.up_proj.weight_scale_inv"]
    scale.mul_(2)
    save_file(quantised, tmp_path / "quantised" / "model.safetensors")
    assert load_folder(tmp_path / "quantised")[0].fingerprint != quantised_model.fingerprint


def with_scales(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Case], Case]:
    scales = torch.ones(shape, dtype=dtype)
    return lambda case: case._replace(stored=case.stored | {f"{NAME}_scale_inv": scales})


MISFITS: list[tuple[Callable[[Case], Case], str]] = [
    (
        lambda case: case._replace(stored={NAME: case.stored[NAME]}),
        r"lacks tensor layer\.weight_scale_inv: the weights and config",
    ),
    (with_scales(2, 3), r"layer\.weight_scale_inv has shape \(2, 3\), but .* of blocks of \(4, 3\)"),
    (with_scales(1, 3, 3), r"layer\.weight_scale_inv has shape \(1, 3, 3\), but these are no scales"),
    (
        with_scales(3, 3, dtype=torch.int32),
        r"layer\.weight_scale_inv is I32 but BF16 or F16 or F32 or F8_E8M0 or U8 is needed",
    ),
    (
        lambda case: case._replace(config=FP8_BLOCKS | {"weight_block_size": [2, 2]}),
        r"no scales of blocks of \(2, 2\) for a weight of \(10, 7\): .* different models",
    ),
    (
        lambda case: case._replace(stored=case.stored | {"layer.weight_scale_2": torch.ones(1)}),
        r"has unexpected tensor layer\.weight_scale_2",
    ),
    (
        lambda case: case._replace(config={}),
        r"quant_method None: supported are fp8, compressed-tensors, .*; use",
    ),
]


@pytest.mark.parametrize(("edit", "message"), MISFITS)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[Case], Case], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        opened(tmp_path, edit(fp8_in_blocks(torch.Generator().manual_seed(0))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [packed_8_bits, mxfp4])
def test_packed_tensor_of_another_shape_is_named(
    tmp_path: Path, make: Callable[[torch.Generator], Case]
) -> None:
    case = make(torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match=rf"{NAME}_(packed|blocks) has shape .* belong to different models"):
        opened(tmp_path, case._replace(shape=(*case.shape[:-1], 2 * case.shape[-1])))


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "has quant_method 'bitsandbytes': supported are fp8"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has version 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "has bits 8"),
    ({"quant_method": "gptq", "bits": 3}, "has bits 3"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'"),
    (packed({}, "marlin-24"), "has format 'marlin-24'"),
    (packed({"num_bits": 4, "type": "float"}), "has 4 bits of type 'float'"),
    (packed({"num_bits": 8, "strategy": "token"}), "has strategy 'token'"),
    (packed({"num_bits": 8}) | {"transform_config": {"R1": {}}}, "has a transform_config"),
    (packed({"num_bits": 8}) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
    (packed({}) | {"config_groups": {}}, "has no kind of weights"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "is damaged .*: download the model again"),
    ({"quant_method": "fp8", "weight_block_size": "x"}, "is damaged"),
    (packed({}) | {"config_groups": 3}, "is damaged"),
]


def test_either_method_names_the_blocks() -> None:
    group = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 3]}
    found = scheme_of(packed(group, "float-quantized"))
    assert found == Scheme("compressed-tensors", ((4, 3),), (8,))
    assert scheme_of(FP8_BLOCKS) == Scheme("fp8", ((4, 3),))
    assert scheme_of(None) is None


INT8, FP8 = ({"num_bits": 8, "type": kind, "strategy": "channel"} for kind in ("int", "float"))
STATIC = DYNAMIC | {"strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("groups", "inputs"),
    [
        ([(INT8, DYNAMIC)], "int8"),
        ([(INT8, {"dynamic": True, "strategy": None})], "int8"),
        ([(INT8, DYNAMIC), (FP8, STATIC)], "int8"),
        ([(INT8, None)], "floats"),
        ([(FP8, DYNAMIC | {"type": "float"})], "floats"),
        ([(INT8, STATIC)], "other"),
        ([(INT8, DYNAMIC | {"symmetric": False})], "other"),
        ([(INT8, DYNAMIC | {"num_bits": 4})], "other"),
        ([(INT8, DYNAMIC | {"type": "float"})], "other"),
        ([(INT8, DYNAMIC), (INT8, None)], "other"),
    ],
)
def test_groups_name_what_integers_are_multiplied_with(
    tmp_path: Path,
    groups: list[tuple[dict[str, Any], dict[str, Any] | None]],
    inputs: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = packed({}, "int-quantized")
    config["config_groups"] = {
        str(index): {"weights": weights, "input_activations": given}
        for index, (weights, given) in enumerate(groups)
    }
    found = scheme_of(config)
    assert found is not None
    assert found.inputs == inputs
    save_file({NAME: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    WeightsFolder(tmp_path, no_progress, digests=True, quantization=config)
    assert ("its activations stay floats: those of all INT8" in caplog.text) == (inputs == "other")


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_quantization_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        scheme_of(config)
    assert "\n" not in str(caught.value)
