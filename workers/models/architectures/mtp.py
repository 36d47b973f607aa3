"""The prediction head of Qwen3-Next (MTP): one more layer, over the model's hidden states and the tokens
after them."""

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.workers.models.architectures.config import DRAFT, ArchitectureConfig, LayerConfig
from tidemill.workers.models.architectures.decoder import Decoder, Layer, Normed
from tidemill.workers.models.collectives import Ranks
from tidemill.workers.models.inputs import Caches, Inputs
from tidemill.workers.models.layers.work import Read, norm_weight


class MtpHead:
    """The head with the embedding and logits of the model. `config` and `read` are as the Decoder's, `draft`
    is its layer."""

    def __init__(
        self,
        config: ArchitectureConfig,
        draft: LayerConfig,
        read: Read,
        decoder: Decoder,
        operators: Operators,
        ranks: Ranks,
    ) -> None:
        def norm(name: str) -> torch.Tensor:
            return norm_weight(read(f"{DRAFT}{name}.weight"), config.norm_offset)

        self._config = config
        self._decoder = decoder
        self._ops = operators
        self._ranks = ranks
        self._token_norm_H = norm("pre_fc_norm_embedding")
        self._hidden_norm_H = norm("pre_fc_norm_hidden")
        self._merge = operators.pack([read(f"{DRAFT}fc.weight")], None)
        self._layer = Layer(
            draft, config.norm_offset, lambda name: read(f"{DRAFT}layers.0.{name}"), operators
        )
        self._norm_H = norm("norm")

    def forward(self, hidden_TH: torch.Tensor, inputs: Inputs, caches: Caches) -> torch.Tensor:
        """See registry.DraftHead. May overwrite the memory of `hidden_TH`."""
        work = self._decoder.work(inputs)
        token_TH = work.ops.rms_norm(self._decoder.embed(inputs.tokens_T), self._token_norm_H, work.epsilon)
        before_TH = work.ops.rms_norm(hidden_TH, self._hidden_norm_H, work.epsilon)
        merged_TH = self._ops.linear(torch.cat([token_TH, before_TH], dim=1), self._merge)
        merged_TH = self._ranks.gather(merged_TH, self._config.hidden)
        normed = Normed(*self._ops.add_norm(None, merged_TH, self._layer.norm_H, work.epsilon))
        return self._decoder.through(self._layer, normed, self._norm_H, work, (caches.kv[-1],)).h_TH
