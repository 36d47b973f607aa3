"""Softmax attention over paged keys and values, over all tokens or a window: that of Llama and its
extensions."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kvstore.layout import Attention, LayerSpec, Window
from tidemill.workers.models.layers.rope import Rope
from tidemill.workers.models.layers.work import Cache, Read, Work, norm_weight
from tidemill.workers.models.loading.sharding import ByHeads, Replicated
from tidemill.workers.models.loading.weights import Weight, bias_back, projection_back


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of a layer. `query_heads` share the KV heads of `spec` evenly.

    rope            None: there are no positional embeddings
    gated           each query head has an output gate beside it (Qwen3-Next)
    normed          q and k are normed head by head; their weights store the difference from `norm_offset`
    bias, out_bias  of the projections to q, k, v and back
    sinks           each query head has a score without a value (gpt-oss)
    scale           of the scores; None: head_dim ** -0.5
    """

    spec: Attention | Window
    query_heads: int
    rope: Rope | None
    gated: bool = False
    normed: bool = False
    norm_offset: float = 0.0
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    scale: float | None = None

    def heads(self) -> dict[str, int]:
        return {"query": self.query_heads, "KV": self.spec.kv_heads}

    def weights(self, hidden: int) -> dict[str, Weight]:
        queries, keys = self.query_heads * self.spec.head_dim, self.spec.kv_heads * self.spec.head_dim
        rows = (1 + self.gated) * queries
        query_cut, key_cut = ByHeads(self.query_heads, (rows,)), ByHeads(self.spec.kv_heads, (keys,))
        found = {
            "self_attn.q_proj.weight": Weight((rows, hidden), query_cut),
            "self_attn.k_proj.weight": Weight((keys, hidden), key_cut),
            "self_attn.v_proj.weight": Weight((keys, hidden), key_cut),
            "self_attn.o_proj.weight": projection_back(hidden, queries),
        }
        if self.bias:
            found |= {
                "self_attn.q_proj.bias": Weight((rows,), query_cut),
                "self_attn.k_proj.bias": Weight((keys,), key_cut),
                "self_attn.v_proj.bias": Weight((keys,), key_cut),
            }
        if self.out_bias:
            found["self_attn.o_proj.bias"] = bias_back(hidden)
        if self.normed:
            found["self_attn.q_norm.weight"] = Weight((self.spec.head_dim,), Replicated())
            found["self_attn.k_norm.weight"] = Weight((self.spec.head_dim,), Replicated())
        if self.sinks:
            cut = ByHeads(self.query_heads, (self.query_heads,))
            found["self_attn.sinks"] = Weight((self.query_heads,), cut)
        return found

    def context_flops(self) -> float:
        """The FLOPs per token and earlier token: none for a window, which does not grow."""
        return 0.0 if isinstance(self.spec, Window) else 4.0 * self.query_heads * self.spec.head_dim

    def part(self, spec: LayerSpec, size: int) -> Self:
        assert isinstance(spec, Attention | Window)
        return replace(self, spec=spec, query_heads=self.query_heads // size)

    def load(self, read: Read, ops: Operators) -> "AttentionMixer":
        def parts(kind: str) -> list[Stored]:
            return [read(f"self_attn.{name}_proj.{kind}") for name in "qkv"]

        def norm(name: str) -> torch.Tensor | None:
            return norm_weight(read(f"self_attn.{name}.weight"), self.norm_offset) if self.normed else None

        bias = torch.cat([part.values for part in parts("bias")]) if self.bias else None
        out_bias = read("self_attn.o_proj.bias").values if self.out_bias else None
        return AttentionMixer(
            config=self,
            project=ops.pack(parts("weight"), bias),
            q_norm_D=norm("q_norm"),
            k_norm_D=norm("k_norm"),
            sinks_H=read("self_attn.sinks").values.float() if self.sinks else None,
            out=ops.pack([read("self_attn.o_proj.weight")], out_bias),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMixer:
    """Attention with its weights. `project` gives q (and its gate) head by head, then k, then v."""

    config: AttentionConfig
    project: Packed
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    sinks_H: torch.Tensor | None
    out: Packed

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        ops, config, spec, (kv,) = work.ops, self.config, self.config.spec, cache
        dim, keys = spec.head_dim, spec.kv_heads * spec.head_dim
        window = spec.tokens if isinstance(spec, Window) else None
        rows = work.inputs if window is None else work.windows
        projected_TI = ops.linear(h_TH, self.project)
        q_THI = projected_TI[:, : -2 * keys].view(len(h_TH), config.query_heads, -1)
        q_THD = ops.rope_store(
            q_THI[..., :dim],
            projected_TI[:, -2 * keys : -keys].view(-1, spec.kv_heads, dim),
            projected_TI[:, -keys:].view(-1, spec.kv_heads, dim),
            self.q_norm_D,
            self.k_norm_D,
            work.epsilon,
            work.angles[config.rope],
            kv,
            rows,
        )
        q_KHD = work.of_kept(q_THD)
        if config.scale is not None:
            q_KHD = q_KHD * (config.scale * dim**0.5)
        paged = (q_KHD, kv, work.seen(rows), window, self.sinks_H)
        if config.gated:
            gate_KHD = work.of_kept(q_THI[..., dim:])
            return work.project_out(ops.gated_attention(*paged, gate_KHD, work.made), self.out)
        return work.project_out(ops.attention(*paged, work.made).flatten(1), self.out)
