"""`embed` on CPU: torch's, which checks the tokens."""

from collections.abc import Callable

import torch

from tidemill.kernels.embed import reference
from tidemill.kernels.shared.recording import Recorder


def bind(recorder: Recorder) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def embed(tokens_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        return recorder.first(lambda: reference.embed(tokens_T, weight_VH))

    return embed
