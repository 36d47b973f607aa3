"""Write a Hugging Face folder as a GGUF file, as the converter of llama.cpp does."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

Q8_0, MXFP4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
}
Tensors = dict[str, torch.Tensor]


def fits(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-1] % 32 == 0


def round_weights(folder: Path) -> None:
    """Give the matrices of a folder values that their kinds in the file hold exactly: gpt-oss has experts of
    4 bits, which its folder has transposed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if f"{name}_bias" in tensors:
            codes = gguf.quantize(tensor.mT.float().contiguous().numpy(), MXFP4)
            tensors[name] = torch.tensor(gguf.dequantize(codes, MXFP4)).mT.contiguous()
        elif fits(tensor):
            codes = gguf.quantize(tensor.float().numpy(), Q8_0)
            tensors[name] = torch.tensor(gguf.dequantize(codes, Q8_0))
    save_file(tensors, path, metadata={"format": "pt"})


def convert(folder: Path, path: Path) -> Path:
    """Write the folder's model, with matrices in Q8_0 where their columns fit."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[raw["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, raw)
    writer.add_value_length(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    names = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    for name, tensor in changed(stacked(load_file(folder / "model.safetensors")), raw).items():
        theirs = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        array = tensor.float().contiguous().numpy()
        if fits(tensor) and "norm" not in theirs and "bias" not in theirs:
            kind = MXFP4 if "_exps" in theirs and raw["model_type"] == "gpt_oss" else Q8_0
            writer.add_tensor(theirs, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, raw: dict[str, Any]) -> None:
    rope = raw["rope_parameters"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if raw.get("num_experts") or raw.get("num_local_experts"):
        writer.add_expert_count(raw.get("num_experts") or raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
    if "moe_intermediate_size" in raw:
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if raw.get(key):
            writer.add_expert_shared_feed_forward_length(raw[key])
    if raw["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        writer.add_sliding_window(raw["sliding_window"])
    if "linear_num_key_heads" in raw:
        writer.add_ssm_group_count(raw["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
        writer.add_ssm_state_size(raw["linear_key_head_dim"])
        writer.add_ssm_inner_size(raw["linear_value_head_dim"] * raw["linear_num_value_heads"])
        writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    if "mamba_n_heads" in raw:
        writer.add_ssm_group_count(raw["mamba_n_groups"])
        writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
        writer.add_ssm_state_size(raw["mamba_d_state"])
        writer.add_ssm_inner_size(raw["mamba_n_heads"] * raw["mamba_d_head"])
        writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
        heads = [
            raw["num_key_value_heads"] * (kind in {"attention", "full_attention"})
            for kind in raw["layer_types"]
        ]
        writer.add_head_count_kv(heads)
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{index}" for index in range(raw["vocab_size"])])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(raw["eos_token_id"])


def stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with those of all experts of a layer as one."""
    found = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for name in tensors.keys() - found.keys():
        if ".experts.0." in name:
            count = sum(
                bool(re.fullmatch(re.escape(name).replace(r"\.0\.", r"\.\d+\.", 9), other))
                for other in tensors
            )
            names = [name.replace(".experts.0.", f".experts.{index}.") for index in range(count)]
            names = [other for other in names if other in tensors]
            found[name.replace(".experts.0.", ".experts.")] = torch.stack([tensors[other] for other in names])
    return found


def changed(tensors: Tensors, raw: dict[str, Any]) -> Tensors:
    """Return the tensors as the converter reorders, changes and renames them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1.", name)
        if raw["model_type"] == "gpt_oss":
            found |= of_gpt_oss(name, layer, tensor)
        else:
            found |= renamed(name, layer, reordered(name, tensor, raw), raw)
    return found


def of_gpt_oss(name: str, layer: str, tensor: torch.Tensor) -> Tensors:
    """Return the tensors that one of gpt-oss becomes."""
    if name.endswith("sinks"):
        return {f"{layer}attn_sinks.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    suffix, rows = ("bias", tensor) if name.endswith("bias") else ("weight", tensor.mT)
    if "experts.down_proj" in name:
        return {f"{layer}ffn_down_exps.{suffix}": rows}
    gate, up = rows[:, 0::2], rows[:, 1::2]
    return {f"{layer}ffn_gate_exps.{suffix}": gate, f"{layer}ffn_up_exps.{suffix}": up}


def reordered(name: str, tensor: torch.Tensor, raw: dict[str, Any]) -> torch.Tensor:
    kind = raw["model_type"]
    if kind in {"llama", "granitemoehybrid"} and (match := re.search(r"self_attn\.([qk])_proj", name)):
        heads = raw["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    has_offset = kind.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in name
    if has_offset and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith("mamba.norm.weight"):
        return tensor.reshape(raw["mamba_n_groups"], -1)
    found = tiled(name, tensor, raw) if kind.startswith("qwen3_5") and "linear_attn." in name else tensor
    return found.squeeze(1) if name.endswith("conv1d.weight") else found


def renamed(name: str, layer: str, tensor: torch.Tensor, raw: dict[str, Any]) -> Tensors:  # noqa: PLR0911  a name each
    """Return the tensors that one becomes, with names in files that start with `layer`, or its own."""
    has_experts = bool(raw.get("num_local_experts"))
    match name.removeprefix("model.").split(".")[2:]:
        case ["linear_attn", "A_log"]:
            return {f"{layer}ssm_a": -tensor.exp()}
        case ["mamba", "A_log"]:
            return {f"{layer}ssm_a": -tensor.exp()[:, None]}
        case ["mamba", "D"]:
            return {f"{layer}ssm_d": tensor[:, None]}
        case [_, "dt_bias"]:
            return {f"{layer}ssm_dt.bias": tensor}
        case ["linear_attn", "in_proj_qkvz", _]:
            groups, keys = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
            values = raw["linear_num_value_heads"] // groups * raw["linear_value_head_dim"]
            parts = tensor.view(groups, -1, tensor.shape[1]).split([keys, keys, values, values], 1)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            return {f"{layer}attn_qkv.weight": torch.cat([q, k, v]), f"{layer}attn_gate.weight": z}
        case ["block_sparse_moe" | "shared_mlp" as part, "input_linear", _]:
            suffix = {"block_sparse_moe": "_exps", "shared_mlp": "_shexp" if has_experts else ""}[part]
            gate, up = tensor.chunk(2, -2)
            return {f"{layer}ffn_gate{suffix}.weight": gate, f"{layer}ffn_up{suffix}.weight": up}
        case ["shared_mlp", "output_linear", _] if not has_experts:
            return {f"{layer}ffn_down.weight": tensor}
        case ["mlp", "shared_expert_gate", _]:
            return {name: tensor[0]}
        case _:
            return {name: tensor}


def tiled(name: str, tensor: torch.Tensor, raw: dict[str, Any]) -> torch.Tensor:
    """Return a tensor with the first value head of each key head, then the second of each."""
    groups, per = raw["linear_num_key_heads"], raw["linear_num_value_heads"] // raw["linear_num_key_heads"]
    keys = 2 * groups * raw["linear_key_head_dim"]

    def rows(part: torch.Tensor) -> torch.Tensor:
        return part.reshape(groups, per, -1, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat([tensor[:keys], rows(tensor[keys:])])
    if "out_proj" in name:
        return rows(tensor.T.contiguous()).T
    return tensor if "linear_attn.norm" in name else rows(tensor)
