"""Qwen3-Next: gated delta rule and gated attention layers, dense or mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe.experts import Experts
from tidemill.kvstore.layout import Attention, Linear
from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.models.qwen3_next_config import Config
from tidemill.workers.tp.collectives import Ranks

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`project` gives q and output gate head by head, then k, then v."""

    spec: Attention
    project: Packed
    q_norm_D: torch.Tensor
    k_norm_D: torch.Tensor
    out: Packed


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """`project` gives q, k, v, z of each key head, then b, a of each key head."""

    spec: Linear
    project: Packed
    conv_WGC: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    out: Packed


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class Moe:
    """`scores` gives a logit of each expert, then that of the shared expert's gate."""

    scores: Packed
    experts: Experts
    shared: Mlp


@dataclass(frozen=True, slots=True)
class Layer:
    norm_H: torch.Tensor
    mixer: AttentionWeights | LinearWeights
    mlp_norm_H: torch.Tensor
    mlp: Mlp | Moe


class Qwen3Next:
    """The model, or a rank's part of it, with its weights in memory. What layers add up is float32, also with
    weights that are kept in bfloat16; the operators decide on the rest.

    A rank has some heads of every mixer, some inner columns of every MLP and some rows of the vocabulary. Of
    the projections back it computes some columns, over the whole of their input: what ranks exchange is
    columns to put side by side, never terms to add up. `config` has the rank's heads, `read` its tensors.
    """

    def __init__(self, config: Config, read: Read, operators: Operators, ranks: Ranks) -> None:
        self._config = config
        self._ops = operators
        self._ranks = ranks
        self._embedding_VH = read("model.embed_tokens.weight")
        self._layers = tuple(
            _load_layer(config, index, lambda name, i=index: read(f"model.layers.{i}.{name}"), operators)
            for index in range(len(config.layers))
        )
        self._norm_H = 1 + read("model.norm.weight").float()
        head_VH = self._embedding_VH if config.tied else read("lm_head.weight")
        self._head = operators.pack(head_VH, None)
        device, rotary_dim = self._embedding_VH.device, config.heads.rotary_dim
        rotary_R = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self._frequencies_R = 1 / config.heads.rope_theta**rotary_R

    def forward(self, inputs: Inputs, caches: Caches) -> torch.Tensor:
        """Final hidden states `[T, hidden]`; writes this step's keys, values and states into `caches`."""
        ops, epsilon = self._ops, self._config.epsilon
        x_TH, branch_TH = None, self._embed(inputs.tokens_T)
        angles_T2R = ops.rope_angles(inputs.positions_T, self._frequencies_R)
        kv, states = iter(caches.kv), iter(zip(caches.conv, caches.temporal, strict=True))
        for layer in self._layers:
            x_TH, h_TH = ops.add_norm(x_TH, branch_TH, layer.norm_H, epsilon)
            match layer.mixer:
                case AttentionWeights() as weights:
                    mixed_TH = self._attend(h_TH, weights, angles_T2R, next(kv), inputs)
                case LinearWeights() as weights:
                    mixed_TH = self._recur(h_TH, weights, *next(states), inputs)
            branch_TH = self._ranks.gather(mixed_TH, self._config.hidden)
            x_TH, h_TH = ops.add_norm(x_TH, branch_TH, layer.mlp_norm_H, epsilon)
            branch_TH = self._ranks.gather(self._mlp(h_TH, layer.mlp), self._config.hidden)
        return ops.add_norm(x_TH, branch_TH, self._norm_H, epsilon)[1]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` of the rows asked for; `[N, 0]` on ranks that are not the leader."""
        return self._ranks.gather_to_leader(self._ops.logits(hidden_NH, self._head), self._config.vocab_size)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Every rank looks up what it can; of each token, the row of the rank that has it counts."""
        ops, ranks, (rows, hidden) = self._ops, self._ranks, self._embedding_VH.shape
        if ranks.size == 1:
            return ops.embed(tokens_T, self._embedding_VH)
        own_TH = ops.embed((tokens_T - ranks.index * rows).clamp(0, rows - 1), self._embedding_VH)
        every_TRH = ranks.gather(own_TH, ranks.size * hidden).view(-1, ranks.size, hidden)
        return every_TRH[torch.arange(len(tokens_T), device=tokens_T.device), tokens_T // rows]

    def _project_out(self, x_TI: torch.Tensor, out: Packed) -> torch.Tensor:
        """This rank's columns, from those of all ranks."""
        return self._ops.linear(self._ranks.gather(x_TI, out.in_features), out)

    def _attend(
        self,
        h_TH: torch.Tensor,
        weights: AttentionWeights,
        angles_T2R: torch.Tensor,
        kv: torch.Tensor,
        inputs: Inputs,
    ) -> torch.Tensor:
        ops, spec, heads = self._ops, weights.spec, self._config.heads.query_heads
        queries, keys = 2 * heads * spec.head_dim, spec.kv_heads * spec.head_dim
        projected_TI = ops.linear(h_TH, weights.project)
        q_gate_THI = projected_TI[:, :queries].view(-1, heads, 2 * spec.head_dim)
        q_THD = ops.rope_store(
            q_gate_THI[..., : spec.head_dim],
            projected_TI[:, queries:-keys].view(-1, spec.kv_heads, spec.head_dim),
            projected_TI[:, -keys:].view(-1, spec.kv_heads, spec.head_dim),
            weights.q_norm_D,
            weights.k_norm_D,
            self._config.epsilon,
            angles_T2R,
            kv,
            inputs,
        )
        o_THD = ops.attention(q_THD, kv, inputs, None, None)
        return self._project_out(ops.sigmoid_mul(o_THD, q_gate_THI[..., spec.head_dim :]), weights.out)

    def _recur(
        self,
        h_TH: torch.Tensor,
        weights: LinearWeights,
        conv: torch.Tensor,
        temporal: torch.Tensor,
        inputs: Inputs,
    ) -> torch.Tensor:
        ops, spec = self._ops, weights.spec
        gates = 2 * spec.value_heads
        projected_TI = ops.linear(h_TH, weights.project)
        qkvz_TGI = projected_TI[:, :-gates].view(len(h_TH), spec.key_heads, -1)
        mixed_TGC = ops.causal_conv(qkvz_TGI[..., : spec.group_channels], weights.conv_WGC, conv, inputs)
        o_TGRV = ops.gated_delta(
            mixed_TGC, projected_TI[:, -gates:], weights.a_log_H, weights.dt_bias_H, temporal, inputs
        )
        z_TGRV = qkvz_TGI[..., spec.group_channels :].view(o_TGRV.shape)
        gated_TI = ops.rms_norm_gated(o_TGRV, z_TGRV, weights.norm_V, self._config.epsilon)
        return self._project_out(gated_TI, weights.out)

    def _mlp(self, h_TH: torch.Tensor, mlp: Mlp | Moe) -> torch.Tensor:
        ops = self._ops
        if isinstance(mlp, Mlp):
            return self._project_out(ops.silu_mul(ops.linear(h_TH, mlp.gate_up)), mlp.down)
        experts, count = mlp.experts, self._config.routing.experts
        scores_TS = ops.logits(h_TH, mlp.scores)
        hidden_TKI, chosen_TK, weights_TK = ops.moe_inner(h_TH, scores_TS[:, :count], experts)
        whole_NI = self._ranks.gather(hidden_TKI.flatten(0, 1), experts.down.in_features)
        whole_TKI = whole_NI.view(*chosen_TK.shape, -1)
        shared_TH, gate_T1 = self._mlp(h_TH, mlp.shared), scores_TS[:, count : count + 1]
        return ops.moe_outer(whole_TKI, chosen_TK, weights_TK, experts, shared_TH, gate_T1)


def _load_layer(config: Config, index: int, read: Read, ops: Operators) -> Layer:
    spec = config.layers[index]
    mixer = (
        _load_linear(spec, read, ops)
        if isinstance(spec, Linear)
        else _load_attention(config, spec, read, ops)
    )
    return Layer(
        # The checkpoint stores these weights as their distance from 1.
        norm_H=1 + read("input_layernorm.weight").float(),
        mixer=mixer,
        mlp_norm_H=1 + read("post_attention_layernorm.weight").float(),
        mlp=_load_moe(config, read, ops) if config.routing.layers[index] else _load_mlp("mlp", read, ops),
    )


def _load_attention(config: Config, spec: Attention, read: Read, ops: Operators) -> AttentionWeights:
    def stacked(kind: str) -> torch.Tensor:
        return torch.cat([read(f"self_attn.{name}_proj.{kind}") for name in "qkv"])

    bias = config.heads.bias
    return AttentionWeights(
        spec=spec,
        project=ops.pack(stacked("weight"), stacked("bias") if bias else None),
        q_norm_D=1 + read("self_attn.q_norm.weight").float(),
        k_norm_D=1 + read("self_attn.k_norm.weight").float(),
        out=ops.pack(read("self_attn.o_proj.weight"), read("self_attn.o_proj.bias") if bias else None),
    )


def _load_linear(spec: Linear, read: Read, ops: Operators) -> LinearWeights:
    projections = [read("linear_attn.in_proj_qkvz.weight"), read("linear_attn.in_proj_ba.weight")]
    return LinearWeights(
        spec=spec,
        project=ops.pack(torch.cat(projections), None),
        conv_WGC=_by_key_head(read("linear_attn.conv1d.weight")[:, 0].float(), spec),
        a_log_H=read("linear_attn.A_log").float(),
        dt_bias_H=read("linear_attn.dt_bias").float(),
        norm_V=read("linear_attn.norm.weight").float(),
        out=ops.pack(read("linear_attn.out_proj.weight"), None),
    )


def _by_key_head(weight_CW: torch.Tensor, spec: Linear) -> torch.Tensor:
    """From the checkpoint's channels, all q, all k, all v, to q, k, v of each key head: `[W, G, C]`."""
    keys = spec.key_heads * spec.key_dim
    q_CW, k_CW, v_CW = weight_CW[:keys], weight_CW[keys : 2 * keys], weight_CW[2 * keys :]
    parts = [part_CW.view(spec.key_heads, -1, spec.conv_width) for part_CW in (q_CW, k_CW, v_CW)]
    return torch.cat(parts, dim=1).permute(2, 0, 1).contiguous()


def _load_mlp(name: str, read: Read, ops: Operators) -> Mlp:
    return Mlp(ops.pack(_gate_up(name, read), None), ops.pack(read(f"{name}.down_proj.weight"), None))


def _load_moe(config: Config, read: Read, ops: Operators) -> Moe:
    names = [f"mlp.experts.{expert}" for expert in range(config.routing.experts)]
    scores_SH = torch.cat([read("mlp.gate.weight"), read("mlp.shared_expert_gate.weight")])
    return Moe(
        # Zeros fill up rows of whole 64 bytes: a device has less to choose from for others.
        scores=ops.pack(functional.pad(scores_SH, (0, 0, 0, -len(scores_SH) % 16)), None),
        experts=Experts(
            gate_up=ops.pack(torch.stack([_gate_up(name, read) for name in names]), None),
            down=ops.pack(torch.stack([read(f"{name}.down_proj.weight") for name in names]), None),
            top_k=config.routing.top_k,
            renormalise=config.routing.renormalise,
        ),
        shared=_load_mlp("mlp.shared_expert", read, ops),
    )


def _gate_up(name: str, read: Read) -> torch.Tensor:
    return torch.cat([read(f"{name}.gate_proj.weight"), read(f"{name}.up_proj.weight")])
