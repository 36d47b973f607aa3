"""Muon for the matrices and AdamW for the rest, over the gradients that all ranks have averaged.

Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the update's scale
follows J. Liu et al., "Muon is scalable for LLM training", 2025.
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.05


def orthogonalised(g_NRC: Tensor, steps: int) -> Tensor:
    """Each matrix with its singular values moved close to 1, by a Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = g_NRC.shape[1] > g_NRC.shape[2]
    x = g_NRC.mT.contiguous() if tall else g_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Orthogonalised momentum; matrices of one shape are worked on together."""

    def __init__(self, parameters: list[Parameter], newton_schulz_steps: int) -> None:
        self.newton_schulz_steps = newton_schulz_steps
        self.groups: dict[torch.Size, list[Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(parameter.shape, []).append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            grads = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum = self.momenta[shape].mul_(MOMENTUM).add_(grads)
            update = orthogonalised(grads + MOMENTUM * momentum, self.newton_schulz_steps)
            scale = 0.2 * math.sqrt(max(shape))
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * WEIGHT_DECAY).add_(change, alpha=-rate * scale)


class Optimizer:
    def __init__(self, weights: dict[str, Parameter], newton_schulz_steps: int) -> None:
        matrices = [
            w for name, w in weights.items() if w.ndim == 2 and name != "embedding" and "conv" not in name
        ]
        others = [w for name, w in weights.items() if w.ndim == 1 or "conv" in name]
        self.muon = Muon(matrices, newton_schulz_steps)
        self.adam = AdamW(
            [
                {"params": [weights["embedding"]], "weight_decay": WEIGHT_DECAY},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-9,
        )

    def step(self, rate: float, embedding_rate: float) -> None:
        for group, group_rate in zip(self.adam.param_groups, (embedding_rate, rate), strict=True):
            group["lr"] = group_rate
        self.adam.step()
        self.muon.step(rate)
        self.adam.zero_grad(set_to_none=True)
