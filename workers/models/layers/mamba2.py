"""Mamba-2 after a causal convolution: the recurrent layers of Granite 4."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.mamba2.heads import Heads as HeadWeights
from tidemill.kvstore.layout import LayerSpec, Linear
from tidemill.workers.models.layers.work import Cache, Read, Work
from tidemill.workers.models.loading.sharding import ByHeadRuns, ByHeads, Replicated
from tidemill.workers.models.loading.weights import Weight, bias_back, projection_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """The Mamba-2 of a layer. A value head of `spec` is a head. A key head is a group of them that a rank may
    have alone. Each group has its B (key) and C (query) in its state, copies where the model has fewer
    `bc_groups`.

    norm_groups       equal parts of the model's whole inner width, each normed by itself
    dt_min, dt_max    bounds of the time step
    conv_bias, bias   of the convolution; of the projections in and out
    """

    spec: Linear
    bc_groups: int
    norm_groups: int
    dt_min: float = 0.0
    dt_max: float = float("inf")
    conv_bias: bool = True
    bias: bool = False
    rope: None = None

    @property
    def inner(self) -> int:
        return self.spec.value_heads * self.spec.value_dim

    @property
    def keys(self) -> int:
        return self.bc_groups * self.spec.key_dim

    def heads(self) -> dict[str, int]:
        return {"Mamba head group": self.spec.key_heads}

    def weights(self, hidden: int) -> dict[str, Weight]:
        spec, x, bc = self.spec, (self.spec.key_heads, self.inner), (self.bc_groups, self.keys)
        dt = (spec.key_heads, spec.value_heads)
        into, conv = ByHeadRuns((x, x, bc, bc, dt)), ByHeadRuns((x, bc, bc))
        rows, channels = 2 * self.inner + 2 * self.keys + spec.value_heads, self.inner + 2 * self.keys
        per_head = Weight((spec.value_heads,), ByHeads(spec.key_heads, (spec.value_heads,)))
        found = {
            "mamba.in_proj.weight": Weight((rows, hidden), into),
            "mamba.conv1d.weight": Weight((channels, 1, spec.conv_width), conv),
            "mamba.A_log": per_head,
            "mamba.dt_bias": per_head,
            "mamba.D": per_head,
            "mamba.norm.weight": Weight((self.inner,), Replicated()),
            "mamba.out_proj.weight": projection_back(hidden, self.inner),
        }
        if self.conv_bias:
            found["mamba.conv1d.bias"] = Weight((channels,), conv)
        if self.bias:
            found["mamba.in_proj.bias"] = Weight((rows,), into)
            found["mamba.out_proj.bias"] = bias_back(hidden)
        return found

    def context_flops(self) -> float:
        return 0.0

    def part(self, spec: LayerSpec, size: int) -> Self:
        assert isinstance(spec, Linear)
        assert spec.key_heads * size == self.spec.key_heads
        return replace(self, spec=spec, bc_groups=max(1, self.bc_groups // size))

    def load(self, read: Read, ops: Operators) -> "Mamba2Mixer":
        def bias(name: str, *, there: bool) -> torch.Tensor | None:
            return read(f"mamba.{name}.bias").values if there else None

        conv_WI = read("mamba.conv1d.weight").values[:, 0].float().t()
        conv_bias_I = bias("conv1d", there=self.conv_bias)
        return Mamba2Mixer(
            config=self,
            project=ops.pack([read("mamba.in_proj.weight")], bias("in_proj", there=self.bias)),
            conv_WGC=self.by_head_group(conv_WI),
            conv_bias_GC=None if conv_bias_I is None else self.by_head_group(conv_bias_I[None].float())[0],
            heads=HeadWeights(
                a_log_H=read("mamba.A_log").values.float(),
                dt_bias_H=read("mamba.dt_bias").values.float(),
                skip_H=read("mamba.D").values.float(),
                dt_min=self.dt_min,
                dt_max=self.dt_max,
            ),
            norm_I=read("mamba.norm.weight").values.float(),
            out=ops.pack([read("mamba.out_proj.weight")], bias("out_proj", there=self.bias)),
        )

    def by_head_group(self, xbc_NI: torch.Tensor) -> torch.Tensor:
        """Reorder all x, all B, all C to B, C and x of each head group, `[N, G, C]`: a copy."""
        spec, shape = self.spec, (len(xbc_NI), self.bc_groups, self.spec.key_heads // self.bc_groups)
        x_NI, bc_NI = xbc_NI[:, : self.inner], (xbc_NI[:, self.inner : -self.keys], xbc_NI[:, -self.keys :])
        b, c = (part_NI.reshape(*shape[:2], 1, spec.key_dim).expand(*shape, -1) for part_NI in bc_NI)
        return torch.cat([b, c, x_NI.reshape(*shape, -1)], dim=-1).flatten(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Mixer:
    """Mamba-2 with its weights. `project` gives z, x, B, C and dt, each of all heads or groups."""

    config: Mamba2Config
    project: Packed
    conv_WGC: torch.Tensor
    conv_bias_GC: torch.Tensor | None
    heads: HeadWeights
    norm_I: torch.Tensor
    out: Packed

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        ops, config, spec, (conv, temporal) = work.ops, self.config, self.config.spec, cache
        projected_TI = ops.linear(h_TH, self.project)
        x_TGC = config.by_head_group(projected_TI[:, config.inner : -spec.value_heads])
        mixed_TGC = ops.causal_conv(x_TGC, self.conv_WGC, self.conv_bias_GC, conv, work.inputs)
        z_TGRV = projected_TI[:, : config.inner].view(len(h_TH), *temporal.shape[1:3], spec.value_dim)
        dt_TH = projected_TI[:, -spec.value_heads :]
        y_TGRV = ops.mamba2(mixed_TGC, z_TGRV, dt_TH, self.heads, temporal, work.inputs)
        whole_KI = work.ranks.gather(work.of_kept(y_TGRV).flatten(1), len(self.norm_I))
        normed_KI = self._norm(whole_KI, work)
        return ops.linear(work.own_columns(normed_KI) if work.sums else normed_KI, self.out)

    def _norm(self, y_TI: torch.Tensor, work: Work) -> torch.Tensor:
        """Norm over the width of all ranks, which each of them computes."""
        groups = self.config.norm_groups
        parts = zip(y_TI.chunk(groups, dim=1), self.norm_I.chunk(groups), strict=True)
        normed = [work.ops.rms_norm(part_TI, weight_I, work.epsilon) for part_TI, weight_I in parts]
        return normed[0] if groups == 1 else torch.cat(normed, dim=1)
