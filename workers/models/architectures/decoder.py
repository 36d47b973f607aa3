"""The stack of layers of every architecture: embedding, alternating mixers and MLPs, head."""

from dataclasses import replace
from typing import NamedTuple

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kvstore.layout import Linear
from tidemill.workers.models.architectures.config import HEAD, ArchitectureConfig, LayerConfig
from tidemill.workers.models.collectives import LEADER, Ranks
from tidemill.workers.models.inputs import Caches, Inputs, Kept
from tidemill.workers.models.layers.moe import Moe
from tidemill.workers.models.layers.rope import Rope
from tidemill.workers.models.layers.work import Cache, Mixer, Mlp, Read, Work, norm_weight


class Layer:
    """Norm and mixer, norm and MLP."""

    def __init__(self, layer: LayerConfig, norm_offset: float, read: Read, ops: Operators) -> None:
        self.norm_H = norm_weight(read("input_layernorm.weight"), norm_offset)
        self.mixer: Mixer = layer.mixer.load(read, ops)
        self.mlp_norm_H = norm_weight(read("post_attention_layernorm.weight"), norm_offset)
        self.mlp: Mlp = layer.mlp.load(read, ops)
        self.is_paged = not isinstance(layer.mixer.spec, Linear)


class Normed(NamedTuple):
    """The sum over the layers so far, at least float32, and its norm for the next layer."""

    x_TH: torch.Tensor
    h_TH: torch.Tensor


class Decoder:
    """The model, or a rank's part of it, with its weights in memory. The sum over layers is float32, also
    with weights in bfloat16; the operators decide on the rest.

    A rank has some heads of every mixer, some inner columns of every MLP and some rows of the vocabulary. Of
    the projections back it computes some columns, over the whole of their input: ranks exchange columns,
    which are concatenated. With `sums` it computes the terms of its own input, and ranks add them up.
    `config` has the rank's heads, `read` its tensors.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        read: Read,
        operators: Operators,
        ranks: Ranks,
        *,
        labels: Stored | None = None,
        sums: bool = False,
        counts: bool = False,
    ) -> None:
        """Load the weights. `labels` are the rows of the head, if it has only some. `counts`: count the load
        of each rank's experts."""
        self._config = config
        self._sums = sums
        self.ops = operators
        self._ranks = ranks
        self._embedding = read(f"{config.prefix}embed_tokens.weight")
        self._head: Packed | None = None
        if config.head:  # before layers: while it is packed, its codes are there twice
            whole = self._embedding if config.tied else None
            self._head = operators.pack([labels or whole or read(HEAD)], None)
        self._layers = tuple(
            Layer(
                layer,
                config.norm_offset,
                lambda name, i=index: read(f"{config.prefix}layers.{i}.{name}"),
                operators,
            )
            for index, layer in enumerate(config.layers)
        )
        self._norm_H = norm_weight(read(f"{config.prefix}norm.weight"), config.norm_offset)
        device = self._embedding.codes.device
        self.expert_pairs_R: torch.Tensor | None = None
        if counts:
            self.expert_pairs_R = torch.zeros(ranks.size, dtype=torch.int64, device=device)
        ropes = dict.fromkeys(layer.mixer.rope for layer in config.every_layer)
        self._frequencies = {rope: rope.frequencies(device) for rope in ropes if rope is not None}

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
        """Return the final hidden states `[T, hidden]`, or those of `kept`; write this step's keys, values
        and states into `caches`."""
        work = self.work(inputs)
        ops, epsilon = self.ops, self._config.epsilon
        normed = Normed(*ops.add_norm(None, self.embed(inputs.tokens_T), self._layers[0].norm_H, epsilon))
        next_norms = [*(layer.norm_H for layer in self._layers[1:]), self._norm_H]
        paged, states = caches.paged(), iter(zip(caches.conv, caches.temporal, strict=True))
        for layer, next_norm_H in zip(self._layers, next_norms, strict=True):
            cache = (next(paged),) if layer.is_paged else next(states)
            if kept is not None and layer is self._layers[-1]:  # of others it computes what goes into caches
                work = replace(work, kept=kept, made={})
            normed = self.through(layer, normed, next_norm_H, work, cache)
        return normed.h_TH

    def through(
        self, layer: Layer, normed: Normed, next_norm_H: torch.Tensor, work: Work, cache: Cache
    ) -> Normed:
        """Return the input of the next layer, whose norm has the weights `next_norm_H`, of the tokens that
        `work` keeps."""
        ops, epsilon = self.ops, self._config.epsilon
        mixed_TH = layer.mixer.run(normed.h_TH, work, cache)
        x_TH = work.of_kept(normed.x_TH)
        work = replace(work, inputs=work.seen(work.inputs), kept=None)
        x_TH, h_TH = ops.add_norm(x_TH, self._branch(mixed_TH), layer.mlp_norm_H, epsilon)
        if isinstance(layer.mlp, Moe) and self._ranks.size == 1 and self._config.residual_scale == 1:
            return Normed(*layer.mlp.run_and_norm(h_TH, work, x_TH, next_norm_H))
        branch_TH = self._branch(layer.mlp.run(h_TH, work))
        return Normed(*ops.add_norm(x_TH, branch_TH, next_norm_H, epsilon))

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits `[N, vocabulary]` of these rows, or of its labels; `[N, 0]` without a head and on
        ranks other than the leader."""
        if self._head is None:
            return hidden_NH[:, :0]
        own_NV = _scaled(self.ops.logits(hidden_NH, self._head), self._config.logits_scale)
        if self._config.labels:
            return own_NV if self._ranks.index == LEADER else own_NV[:, :0]
        return self._ranks.gather_to_leader(own_NV, self._config.vocab_size)

    def work(self, inputs: Inputs) -> Work:
        """Return the data of the step that layers share."""
        no_rotation = torch.empty(len(inputs.positions_T), 2, 0, device=inputs.positions_T.device)
        angles: dict[Rope | None, torch.Tensor] = {None: no_rotation}
        for rope, frequencies_R in self._frequencies.items():
            angles[rope] = _scaled(self.ops.rope_angles(inputs.positions_T, frequencies_R), rope.scale)
        return Work(
            ops=self.ops,
            ranks=self._ranks,
            epsilon=self._config.epsilon,
            inputs=inputs,
            windows=inputs.of_windows,
            angles=angles,
            sums=self._sums,
            expert_pairs_R=self.expert_pairs_R,
        )

    def _branch(self, part_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer from the terms or the columns of all ranks."""
        if self._sums:
            whole_TH = self._ranks.reduce(part_TH)
        else:
            whole_TH = self._ranks.gather(part_TH, self._config.hidden)
        return _scaled(whole_TH, self._config.residual_scale)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Look up the tokens. Each rank has some rows; of each token, the row of the rank that has it
        counts."""
        ops, ranks, rows = self.ops, self._ranks, len(self._embedding.codes)
        if ranks.size == 1:
            return _scaled(ops.embed(tokens_T, self._embedding), self._config.embedding_scale)
        own_TH = ops.embed((tokens_T - ranks.index * rows).clamp(0, rows - 1), self._embedding)
        hidden = own_TH.shape[1]
        every_TRH = ranks.gather(own_TH, ranks.size * hidden).view(-1, ranks.size, hidden)
        found_TH = every_TRH[torch.arange(len(tokens_T), device=tokens_T.device), tokens_T // rows]
        return _scaled(found_TH, self._config.embedding_scale)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1 else x * scale
