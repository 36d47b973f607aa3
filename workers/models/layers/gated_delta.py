"""The gated delta rule after a causal convolution: the linear attention of Qwen3-Next and Qwen3.5."""

from dataclasses import dataclass, replace
from typing import Literal, Self, assert_never

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored, join
from tidemill.kvstore.layout import LayerSpec, Linear
from tidemill.workers.models.layers.work import Cache, Read, Work
from tidemill.workers.models.loading.sharding import ByHeads, Replicated
from tidemill.workers.models.loading.weights import Role, Weight, projection_back


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The gated delta rule of a layer.

    stored      by head: in_proj_qkvz has q, k, v, z of each key head, in_proj_ba has b, a of each
                by part: in_proj_qkv has all of q, all of k, all of v; z, b and a have tensors of their own
    """

    spec: Linear
    stored: Literal["by head", "by part"] = "by head"
    rope: None = None

    def heads(self) -> dict[str, int]:
        return {"key": self.spec.key_heads}

    def weights(self, hidden: int) -> dict[str, Weight]:
        spec = self.spec
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        channels = 2 * keys + values

        def by_key_head(*shape: int, role: Role = "matrix") -> Weight:
            return Weight(shape, ByHeads(spec.key_heads, (shape[0],)), role=role)

        by_part = ByHeads(spec.key_heads, (keys, keys, values))
        match self.stored:
            case "by head":
                found = {
                    "linear_attn.in_proj_qkvz.weight": by_key_head(channels + values, hidden),
                    "linear_attn.in_proj_ba.weight": by_key_head(
                        2 * spec.value_heads, hidden, role="precise"
                    ),
                }
            case "by part":
                found = {
                    "linear_attn.in_proj_qkv.weight": Weight((channels, hidden), by_part),
                    "linear_attn.in_proj_z.weight": by_key_head(values, hidden),
                    "linear_attn.in_proj_b.weight": by_key_head(spec.value_heads, hidden, role="precise"),
                    "linear_attn.in_proj_a.weight": by_key_head(spec.value_heads, hidden, role="precise"),
                }
            case _:
                assert_never(self.stored)
        return found | {
            "linear_attn.conv1d.weight": Weight((channels, 1, spec.conv_width), by_part),
            "linear_attn.A_log": by_key_head(spec.value_heads),
            "linear_attn.dt_bias": by_key_head(spec.value_heads),
            "linear_attn.norm.weight": Weight((spec.value_dim,), Replicated()),
            "linear_attn.out_proj.weight": projection_back(hidden, values),
        }

    def context_flops(self) -> float:
        return 0.0

    def part(self, spec: LayerSpec, size: int) -> Self:
        assert isinstance(spec, Linear)
        assert spec.key_heads * size == self.spec.key_heads
        return replace(self, spec=spec)

    def load(self, read: Read, ops: Operators) -> "DeltaMixer":
        spec = self.spec
        conv_GCW = _by_key_head(read("linear_attn.conv1d.weight").values[:, 0].float(), spec)
        return DeltaMixer(
            spec=spec,
            project=ops.pack(self._projections(read), None),
            conv_WGC=conv_GCW.permute(2, 0, 1).contiguous(),
            a_log_H=read("linear_attn.A_log").values.float(),
            dt_bias_H=read("linear_attn.dt_bias").values.float(),
            norm_V=read("linear_attn.norm.weight").values.float(),
            out=ops.pack([read("linear_attn.out_proj.weight")], None),
        )

    def _projections(self, read: Read) -> list[Stored]:
        """Return parts of `[I, hidden]` in the order of DeltaMixer.project."""

        def weight(name: str) -> Stored:
            return read(f"linear_attn.in_proj_{name}.weight")

        match self.stored:
            case "by head":
                return [weight("qkvz"), weight("ba")]
            case "by part":
                groups = self.spec.key_heads
                qkv_GCH = weight("qkv").moved(lambda rows: _by_key_head(rows, self.spec))
                z_GIH, b_GRH, a_GRH = (
                    weight(name).moved(lambda rows: rows.view(groups, -1, rows.shape[1])) for name in "zba"
                )
                heads_GIH, gates_GIH = join([qkv_GCH, z_GIH]), join([b_GRH, a_GRH])
                return [part.moved(lambda rows: rows.flatten(0, 1)) for part in (heads_GIH, gates_GIH)]
            case _:
                assert_never(self.stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMixer:
    """The gated delta rule with its weights. `project` gives q, k, v, z of each key head, then b, a of each
    key head."""

    spec: Linear
    project: Packed
    conv_WGC: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    out: Packed

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        ops, spec, (conv, temporal) = work.ops, self.spec, cache
        gates = 2 * spec.value_heads
        projected_TI = ops.linear(h_TH, self.project)
        qkvz_TGI = projected_TI[:, :-gates].view(len(h_TH), spec.key_heads, -1)
        mixed_TGC = ops.causal_conv(
            qkvz_TGI[..., : spec.group_channels], self.conv_WGC, None, conv, work.inputs
        )
        o_TGRV = ops.gated_delta(
            mixed_TGC, projected_TI[:, -gates:], self.a_log_H, self.dt_bias_H, temporal, work.inputs
        )
        z_TGRV = qkvz_TGI[..., spec.group_channels :].view(o_TGRV.shape)
        normed_TI = ops.rms_norm_gated(work.of_kept(o_TGRV), work.of_kept(z_TGRV), self.norm_V, work.epsilon)
        return work.project_out(normed_TI, self.out)


def _by_key_head(weight_CN: torch.Tensor, spec: Linear) -> torch.Tensor:
    """Reorder the checkpoint's channels, all q, all k, all v, to q, k, v of each key head: `[G, C, N]`."""
    keys = spec.key_heads * spec.key_dim
    parts = weight_CN[:keys], weight_CN[keys : 2 * keys], weight_CN[2 * keys :]
    width = weight_CN.shape[1]
    return torch.cat([part_CN.view(spec.key_heads, -1, width) for part_CN in parts], dim=1)
