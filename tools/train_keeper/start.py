"""The structured initial weights: what makes recall emerge within minutes instead of hours.

Keys start equal to queries, so that a head retrieves what it stored; outputs start as the transpose of the
values, so that what is retrieved is close to the embedding of what was read; and a constant direction of the
embedding opens the gates.
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from itertools import pairwise

import torch
from torch import Generator, Tensor
from transformers import Qwen3NextConfig

from tools.train_keeper.native import HEAD_DIM

# Decay per token of the two heads of a layer, by turns: one long memory, one short.
DECAYS = ((0.001, 0.2), (0.004, 0.05))


class Draw:
    """Normal and orthogonal matrices from one seeded generator; `width` is the hidden size."""

    def __init__(self, width: int, seed: int) -> None:
        self.width = width
        self.generator = Generator().manual_seed(seed)
        self.constant_D = self.normal(width, scale=1.0)
        self.constant_D /= self.constant_D.norm()

    def normal(self, *shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def matrix(self, rows: int, scale: float) -> Tensor:
        """Rows over the hidden size whose products with a unit-variance input have deviation `scale`."""
        return self.normal(rows, self.width, scale=scale / math.sqrt(self.width))

    def without_constant(self, w_RD: Tensor) -> Tensor:
        return w_RD - torch.outer(w_RD @ self.constant_D, self.constant_D)

    def orthogonal(self, rows: int) -> Tensor:
        """Orthonormal rows (rows <= width) that ignore the constant direction."""
        q, _ = torch.linalg.qr(self.normal(self.width, rows, scale=1.0))
        return self.without_constant(q.T)


def initial_weights(config: Qwen3NextConfig, seed: int) -> dict[str, Tensor]:
    """Weights under transformers' names, float32."""
    draw = Draw(config.hidden_size, seed)
    embedding_VD = draw.normal(config.vocab_size, draw.width, scale=0.07)
    embedding_VD = draw.without_constant(embedding_VD) + 0.5 * draw.constant_D
    weights = {"model.embed_tokens.weight": embedding_VD, "lm_head.weight": embedding_VD}
    weights["model.norm.weight"] = torch.zeros(draw.width)
    layer_types: list[str] = list(config.layer_types or ())
    for i, layer_type in enumerate(layer_types):
        layer = _mlp(config, draw, depth=len(layer_types))
        layer |= (
            _linear(config, draw, DECAYS[i % 2]) if layer_type == "linear_attention" else _full(config, draw)
        )
        layer |= {f"{name}_layernorm.weight": torch.zeros(draw.width) for name in ("input", "post_attention")}
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return weights


def _mlp(config: Qwen3NextConfig, draw: Draw, depth: int) -> dict[str, Tensor]:
    inner: int = config.intermediate_size
    return {
        "mlp.gate_proj.weight": draw.matrix(inner, 0.6),
        "mlp.up_proj.weight": draw.matrix(inner, 0.6),
        "mlp.down_proj.weight": draw.normal(draw.width, inner, scale=0.6 / math.sqrt(inner * depth / 2)),
    }


def _linear(config: Qwen3NextConfig, draw: Draw, decays: tuple[float, ...]) -> dict[str, Tensor]:
    heads: int = config.linear_num_key_heads
    assert heads == config.linear_num_value_heads == len(decays)
    columns = heads * HEAD_DIM
    k_RD = draw.without_constant(draw.matrix(columns, 1.0))
    q_RD = k_RD + draw.without_constant(draw.matrix(columns, 0.15))
    v_RD = draw.orthogonal(columns)
    z_RD = draw.matrix(columns, 0.3) + 0.25 * draw.constant_D
    by_head = [
        part
        for head in zip(*(w.split(HEAD_DIM) for w in (q_RD, k_RD, v_RD, z_RD)), strict=True)
        for part in head
    ]
    decay_H = torch.tensor(decays)
    return {
        "linear_attn.in_proj_qkvz.weight": torch.cat(by_head),
        "linear_attn.in_proj_ba.weight": draw.matrix(2 * heads, 0.3),
        "linear_attn.conv1d.weight": _convolution(draw, columns),
        "linear_attn.out_proj.weight": 0.5 * v_RD.T
        + draw.normal(draw.width, columns, scale=0.1 / math.sqrt(columns)),
        "linear_attn.A_log": torch.zeros(heads),
        "linear_attn.dt_bias": decay_H + torch.log(-torch.expm1(-decay_H)),  # softplus gives the decay back
        "linear_attn.norm.weight": torch.full((HEAD_DIM,), 0.5),
    }


def _convolution(draw: Draw, columns: int) -> Tensor:
    """Queries and keys average four tokens; of the value channels, every other one sees one token."""
    taps_C4 = draw.normal(3 * columns, 4, scale=0.08)
    query, key, value = (slice(a * columns, b * columns) for a, b in pairwise(range(4)))
    taps_C4[query] = taps_C4[key]
    taps_C4[query] += 0.35
    taps_C4[key] += 0.35
    taps_C4[value][0::2] += 0.5
    taps_C4[value][1::2, -1] += 1.0
    return taps_C4.unsqueeze(1)


def _full(config: Qwen3NextConfig, draw: Draw) -> dict[str, Tensor]:
    queries: int = config.num_attention_heads
    keys: int = config.num_key_value_heads
    k_HND = draw.orthogonal(keys * HEAD_DIM).split(HEAD_DIM)
    v_HND = draw.orthogonal(keys * HEAD_DIM).split(HEAD_DIM)
    q_and_gate: list[Tensor] = []
    for head in range(queries):
        q_and_gate += [k_HND[head * keys // queries] + draw.matrix(HEAD_DIM, 0.3)]
        q_and_gate += [draw.matrix(HEAD_DIM, 0.3)]
    out = torch.cat([v_HND[head * keys // queries].T for head in range(queries)], dim=1)
    columns = queries * HEAD_DIM
    return {
        "self_attn.q_proj.weight": torch.cat(q_and_gate),
        "self_attn.k_proj.weight": torch.cat(k_HND),
        "self_attn.v_proj.weight": torch.cat(v_HND),
        "self_attn.o_proj.weight": 0.5 * out
        + draw.normal(draw.width, columns, scale=0.1 / math.sqrt(columns)),
        "self_attn.q_norm.weight": torch.full((HEAD_DIM,), 0.3),
        "self_attn.k_norm.weight": torch.full((HEAD_DIM,), 0.3),
    }
