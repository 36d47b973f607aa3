"""The keeper as its training sees it: a dense Qwen3-Next over the fused kernels.

The computation is that of transformers' `Qwen3NextForCausalLM` (tests compare them); projections that a layer
applies to the same input are one matrix here.
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers import Qwen3NextConfig

from tools.train_keeper.native import HEAD_DIM, Heads, Kernels, MixerWeights

ROPE_THETA = 10000.0
ROPE_SHARE = 0.25


def keeper_config(vocabulary_size: int, pad_id: int, end_id: int) -> Qwen3NextConfig:
    """Four layers, 0.7 million parameters; the vocabulary is padded to a multiple of 64."""
    return Qwen3NextConfig(
        vocab_size=-(-vocabulary_size // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=0,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": ROPE_SHARE,
        },
        pad_token_id=pad_id,
        eos_token_id=end_id,
        bos_token_id=None,
    )


@dataclass(frozen=True)
class Disturbance:
    """The disturbances of training, so that each kind of fact is recalled the way a hybrid should recall
    it.

    `reset` [B, T]: float32, added to the logarithm of the state's decay (0, or so negative that the state is
    lost). `value_source` [B, T]: int64, the token whose attention value stands in for this token's own.
    """

    reset: Tensor
    value_source: Tensor


class Keeper(Module):
    def __init__(self, config: Qwen3NextConfig, weights: dict[str, Tensor], kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.layer_types = cast("list[str]", config.layer_types)
        self.heads = Heads(config.linear_num_key_heads, config.linear_num_value_heads)
        fused = fuse(weights, self.layer_types, self.heads)
        self.weights = ParameterDict({name: Parameter(tensor) for name, tensor in fused.items()})

    def forward(self, ids_BT: Tensor, disturbance: Disturbance, selected: Tensor | None = None) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V], or [N, V] for the N selected positions of the flat batch."""
        x_BTD = self.hidden(ids_BT, disturbance)
        if selected is not None:
            x_BTD = x_BTD.flatten(0, 1)[selected]
        return linear(x_BTD, self.weights["embedding"])

    def hidden(self, ids_BT: Tensor, disturbance: Disturbance) -> Tensor:
        """Return the input of the logits, [B, T, D]."""
        weights, norm = self.weights, self.kernels.norm
        x_BTD = embedding(ids_BT, weights["embedding"])
        for i, layer_type in enumerate(self.layer_types):
            projected_BTX = linear(norm(x_BTD, weights[f"{i}_mixer_norm"]), weights[f"{i}_in"])
            if layer_type == "linear_attention":
                mixed_BTD = self._linear_attention(i, projected_BTX, disturbance.reset)
            else:
                mixed_BTD = self._attention(i, projected_BTX, disturbance.value_source)
            x_BTD = x_BTD + linear(mixed_BTD, weights[f"{i}_out"])
            gate_up_BTF2 = linear(norm(x_BTD, weights[f"{i}_mlp_norm"]), weights[f"{i}_gate_up"])
            x_BTD = x_BTD + linear(self.kernels.swiglu(gate_up_BTF2), weights[f"{i}_down"])
        return norm(x_BTD, weights["norm"])

    def _linear_attention(self, i: int, projected_BTX: Tensor, reset_BT: Tensor) -> Tensor:
        own = [self.weights[f"{i}_{name}"] for name in ("conv", "log_a", "dt_bias", "gated_norm")]
        return self.kernels.mixer(projected_BTX, MixerWeights(*own), self.heads, reset_BT)

    def _attention(self, i: int, projected_BTX: Tensor, value_source_BT: Tensor) -> Tensor:
        batch, length, _ = projected_BTX.shape
        queries, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        q_gate, k, v = projected_BTX.split([2 * queries * HEAD_DIM, keys * HEAD_DIM, keys * HEAD_DIM], dim=-1)
        q, gate = q_gate.unflatten(-1, (queries, 2 * HEAD_DIM)).chunk(2, dim=-1)
        k, v = k.unflatten(-1, (keys, HEAD_DIM)), v.unflatten(-1, (keys, HEAD_DIM))
        v = v.gather(1, value_source_BT[:, :, None, None].expand_as(v))
        cos, sin = _rope_tables(length)
        norm = self.kernels.norm
        q_BHTD = _rotate(norm(q, self.weights[f"{i}_q_norm"]).transpose(1, 2), cos, sin)
        k_BHTD = _rotate(norm(k, self.weights[f"{i}_k_norm"]).transpose(1, 2), cos, sin)
        k_BHTD = k_BHTD.repeat_interleave(queries // keys, 1)
        v_BHTD = v.transpose(1, 2).repeat_interleave(queries // keys, 1)
        attended = scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True).transpose(1, 2)
        return (attended * torch.sigmoid(gate)).reshape(batch, length, -1)

    def exported(self) -> dict[str, Tensor]:
        """The weights under transformers' names."""
        fused = {name: tensor.detach() for name, tensor in self.weights.items()}
        queries, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        attention_rows = [2 * queries * HEAD_DIM, keys * HEAD_DIM, keys * HEAD_DIM]
        return split(fused, self.layer_types, self.heads, attention_rows)


def _rope_tables(length: int) -> tuple[Tensor, Tensor]:
    rotated = int(HEAD_DIM * ROPE_SHARE)
    frequencies = ROPE_THETA ** -(torch.arange(0, rotated, 2).float() / rotated)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BHTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    rotated, kept = x_BHTD.split([cos_TR.shape[-1], x_BHTD.shape[-1] - cos_TR.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos_TR + torch.cat([-second, first], dim=-1) * sin_TR
    return torch.cat([turned, kept], dim=-1)


# Names here -> names in transformers. Rows of several matrices are stacked in this order.
_COMMON = {
    "mixer_norm": ("input_layernorm.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
_LINEAR = {
    "in": ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    "conv": ("linear_attn.conv1d.weight",),
    "log_a": ("linear_attn.A_log",),
    "dt_bias": ("linear_attn.dt_bias",),
    "gated_norm": ("linear_attn.norm.weight",),
    "out": ("linear_attn.out_proj.weight",),
}
_FULL = {
    "in": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
}


def _layer_names(layer_type: str) -> dict[str, tuple[str, ...]]:
    return _COMMON | (_LINEAR if layer_type == "linear_attention" else _FULL)


def _projection_order(heads: Heads) -> Tensor:
    """Rows of in_proj_qkvz and in_proj_ba, which lie grouped by key head, as q|k|v|z|beta|decay."""
    ratio = heads.values // heads.keys
    widths = (HEAD_DIM, HEAD_DIM, ratio * HEAD_DIM, ratio * HEAD_DIM)
    grouped = torch.arange(heads.keys * sum(widths)).view(heads.keys, sum(widths)).split(widths, dim=1)
    gates = torch.arange(2 * heads.values).view(heads.keys, 2 * ratio).split(ratio, dim=1)
    first_gate = heads.keys * sum(widths)
    return torch.cat([part.flatten() for part in grouped] + [first_gate + part.flatten() for part in gates])


def fuse(weights: dict[str, Tensor], layer_types: Sequence[str], heads: Heads) -> dict[str, Tensor]:
    """transformers' weights under the names of this file, float32."""
    fused = {"embedding": weights["model.embed_tokens.weight"], "norm": weights["model.norm.weight"]}
    for i, layer_type in enumerate(layer_types):
        for name, sources in _layer_names(layer_type).items():
            tensor = torch.cat([weights[f"model.layers.{i}.{source}"] for source in sources])
            if name == "in" and layer_type == "linear_attention":
                tensor = tensor[_projection_order(heads)]
            fused[f"{i}_{name}"] = tensor.squeeze(1) if name == "conv" else tensor
    return {name: tensor.detach().float().contiguous().clone() for name, tensor in fused.items()}


def split(
    fused: dict[str, Tensor], layer_types: Sequence[str], heads: Heads, attention_rows: Sequence[int]
) -> dict[str, Tensor]:
    """The inverse of `fuse`; `attention_rows` are those of the query (with gate), key and value."""
    weights = {
        "model.embed_tokens.weight": fused["embedding"],
        "model.norm.weight": fused["norm"],
        "lm_head.weight": fused["embedding"],
    }
    for i, layer_type in enumerate(layer_types):
        for name, targets in _layer_names(layer_type).items():
            tensor = fused[f"{i}_{name}"]
            rows: Sequence[int] = [len(tensor) // len(targets)] * len(targets)
            if name == "in" and layer_type == "linear_attention":
                order = _projection_order(heads)
                tensor = torch.empty_like(tensor).index_copy_(0, order, tensor)
                rows = [len(tensor) - 2 * heads.values, 2 * heads.values]
            elif name == "in":
                rows = attention_rows
            tensor = tensor.unsqueeze(1) if name == "conv" else tensor
            for target, part in zip(targets, tensor.split(list(rows)), strict=True):
                weights[f"model.layers.{i}.{target}"] = part
    return {name: tensor.contiguous().clone() for name, tensor in weights.items()}
