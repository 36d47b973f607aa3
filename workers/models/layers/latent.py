"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434): one latent per token for all heads.

Every path computes the absorbed form: a query is projected into the space of the latents, where values are
the latents themselves, and its result is projected back. So prefill and decode have the same bits.

    latent    [rotary key | normed compression]
    query     [rotary part | absorbed rest]         of each head, as wide as a latent
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import plain
from tidemill.kvstore.layout import Latent, LayerSpec
from tidemill.workers.models.layers.rope import Rope
from tidemill.workers.models.layers.work import Cache, Read, Work
from tidemill.workers.models.loading.sharding import ByHeads, Replicated
from tidemill.workers.models.loading.weights import Weight, bias_back, projection_back

NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The latent attention of a layer. `rope.dim + compressed` is the width of `spec`.

    plain, value     dimensions of a head's query without rotation, and of its values
    query_rank       the width to which queries are compressed; None: they are not
    interleaved      the checkpoint rotates element 2 i with 2 i + 1; they are reordered when loaded
    scale            of the scores
    """

    spec: Latent
    query_heads: int
    rope: Rope
    compressed: int
    plain: int
    value: int
    query_rank: int | None
    interleaved: bool
    bias: bool
    scale: float

    def heads(self) -> dict[str, int]:
        return {"query": self.query_heads}

    def weights(self, hidden: int) -> dict[str, Weight]:
        heads, queries = self.query_heads, self.query_heads * (self.plain + self.rope.dim)
        values = heads * (self.plain + self.value)
        by_head = ByHeads(heads, (queries,))
        found = {
            "self_attn.kv_a_proj_with_mqa.weight": Weight((self.spec.width, hidden), Replicated()),
            "self_attn.kv_a_layernorm.weight": Weight((self.compressed,), Replicated()),
            "self_attn.kv_b_proj.weight": Weight((values, self.compressed), ByHeads(heads, (values,))),
            "self_attn.o_proj.weight": projection_back(hidden, heads * self.value),
        }
        if self.bias:
            found["self_attn.kv_a_proj_with_mqa.bias"] = Weight((self.spec.width,), Replicated())
            found["self_attn.o_proj.bias"] = bias_back(hidden)
        if self.query_rank is None:
            return found | {"self_attn.q_proj.weight": Weight((queries, hidden), by_head)}
        if self.bias:
            found["self_attn.q_a_proj.bias"] = Weight((self.query_rank,), Replicated())
        return found | {
            "self_attn.q_a_proj.weight": Weight((self.query_rank, hidden), Replicated()),
            "self_attn.q_a_layernorm.weight": Weight((self.query_rank,), Replicated()),
            "self_attn.q_b_proj.weight": Weight((queries, self.query_rank), by_head),
        }

    def context_flops(self) -> float:
        return 4.0 * self.query_heads * self.spec.width

    def part(self, spec: LayerSpec, size: int) -> Self:
        assert spec == self.spec
        return replace(self, query_heads=self.query_heads // size)

    def load(self, read: Read, ops: Operators) -> "LatentMixer":
        def bias(name: str) -> torch.Tensor | None:
            return read(f"self_attn.{name}.bias").values if self.bias else None

        down = None
        if self.query_rank is not None:
            down = QueryDown(
                project=ops.pack([read("self_attn.q_a_proj.weight")], bias("q_a_proj")),
                norm_R=read("self_attn.q_a_layernorm.weight").values.float(),
            )
        up_IR = read("self_attn.q_proj.weight" if down is None else "self_attn.q_b_proj.weight")
        latent = read("self_attn.kv_a_proj_with_mqa.weight")
        latent_bias = bias("kv_a_proj_with_mqa")
        keys_values_HIC = read("self_attn.kv_b_proj.weight").weight_only.moved(
            lambda rows: rows.view(self.query_heads, self.plain + self.value, -1)
        )
        absorb_HCI = keys_values_HIC.factors(ops.compute_dtype)[:, : self.plain].mT.contiguous()
        return LatentMixer(
            config=self,
            down=down,
            up=ops.pack([up_IR.moved(lambda rows: self._rotary_first(rows, self.plain))], None),
            latent=ops.pack(
                [latent.moved(lambda rows: self._rotary_first(rows, self.compressed))],
                None if latent_bias is None else self._rotary_first(latent_bias, self.compressed),
            ),
            norm_C=read("self_attn.kv_a_layernorm.weight").values.float(),
            absorb=ops.pack([plain(absorb_HCI)], None),
            release=ops.pack([keys_values_HIC.moved(lambda rows: rows[:, self.plain :].contiguous())], None),
            out=ops.pack([read("self_attn.o_proj.weight")], bias("o_proj")),
        )

    def _rotary_first(self, rows: torch.Tensor, others: int) -> torch.Tensor:
        """Move the last `rope.dim` rows of each head, which are rotated, before the `others`."""
        rows_HI = rows.view(-1, others + self.rope.dim, *rows.shape[1:])
        rest, rotary = rows_HI[:, :others], rows_HI[:, others:]
        if self.interleaved:
            rotary = torch.cat([rotary[:, 0::2], rotary[:, 1::2]], dim=1)
        return torch.cat([rotary, rest], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryDown:
    """The source of a compressed query."""

    project: Packed
    norm_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMixer:
    """Latent attention with its weights. `up` gives [rotary part | rest] of each head, `latent` gives [rotary
    key | compression].

    `absorb` [H, C, rest] and `release` [H, value, C] are the two halves of the projection from a compression
    to keys and values.
    """

    config: LatentConfig
    down: QueryDown | None
    up: Packed
    latent: Packed
    norm_C: torch.Tensor
    absorb: Packed
    release: Packed
    out: Packed

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        ops, config, (latents,) = work.ops, self.config, cache
        rotary, width = config.rope.dim, config.spec.width
        from_TR = h_TH
        if self.down is not None:
            from_TR = ops.rms_norm(ops.linear(h_TH, self.down.project), self.down.norm_R, NORM_EPSILON)
        q_THI = ops.linear(from_TR, self.up).view(len(h_TH), config.query_heads, -1)
        absorbed_THC = ops.linear_heads(q_THI[..., rotary:], self.absorb)
        latent_TI = ops.linear(h_TH, self.latent)
        compressed_TC = ops.rms_norm(latent_TI[:, rotary:], self.norm_C, NORM_EPSILON)
        q_THI = ops.rope_store(
            torch.cat([q_THI[..., :rotary], absorbed_THC], dim=-1),
            torch.cat([latent_TI[:, :rotary], compressed_TC], dim=-1)[:, None],
            None,
            None,
            None,
            work.epsilon,
            work.angles[config.rope],
            latents,
            work.inputs,
        )
        q_KHI = work.of_kept(q_THI) * (config.scale * width**0.5)
        o_KHI = ops.attention(q_KHI, latents, work.seen(work.inputs), None, None, work.made)
        o_KHV = ops.linear_heads(o_KHI[..., rotary:], self.release)
        return work.project_out(o_KHV.flatten(1), self.out)
