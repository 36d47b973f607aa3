"""`moe` on CPU: each token's sum runs in ascending order of its experts, whatever else is in the batch."""

from collections.abc import Callable

import torch

from tidemill.kernels.build import Library
from tidemill.kernels.moe.experts import Experts


def bind(library: Library) -> Callable[[torch.Tensor, torch.Tensor, Experts], torch.Tensor]:
    route = library.function("moe_route")
    run = library.function("moe_experts")

    def moe(x_TH: torch.Tensor, logits_TE: torch.Tensor, experts: Experts) -> torch.Tensor:
        (tokens, width), count = x_TH.shape, logits_TE.shape[1]
        assert x_TH.dtype == logits_TE.dtype == torch.float32
        assert x_TH.is_contiguous()
        assert logits_TE.is_contiguous()
        gate_up, down = experts.gate_up.data, experts.down.data
        chosen_TK = torch.empty(tokens, experts.top_k, dtype=torch.int32)
        weights_TK = x_TH.new_empty(tokens, experts.top_k)
        y_TH = x_TH.new_empty(tokens, width)
        route(
            logits_TE.data_ptr(), chosen_TK.data_ptr(), weights_TK.data_ptr(),
            tokens, count, experts.top_k, experts.renormalise,
        )  # fmt: skip
        run(
            x_TH.data_ptr(), chosen_TK.data_ptr(), weights_TK.data_ptr(),
            gate_up.data_ptr(), gate_up.stride(0), down.data_ptr(), down.stride(0), y_TH.data_ptr(),
            tokens, count, experts.top_k, width, experts.down.in_features,
        )  # fmt: skip
        return y_TH

    return moe
