"""Rotary position embedding: the frequencies of a config.json. Pure.

The types are those of transformers: default, linear (Chen et al., arXiv 2306.15595), llama3 (by wavelength)
and yarn (Peng et al., arXiv 2309.00071).
"""

import math
from dataclasses import dataclass
from typing import Literal, assert_never, cast

import torch

from tidemill.workers.models.loading.config_json import Raw, nested, number, require

Kind = Literal["default", "linear", "llama3", "yarn"]
KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
"""The types in config.json. A dynamic one is a default one up to `max_position_embeddings`, where we end."""

THETA = 10_000.0
"""The default of transformers for all families but gpt-oss: folders of Llama 2 have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding. It rotates the first `dim` elements of a head, element i with element i + dim /
    2.

    `factor` and the following are for types that extend a model to longer texts; `scale` is that of cos and
    sin.
    """

    dim: int
    theta: float
    kind: Kind = "default"
    factor: float = 1.0
    trained_length: int = 0
    slow: float = 1.0  # rotations over the trained length: below them a frequency is stretched in full
    fast: float = 32.0  # ... above them not at all
    truncate: bool = True
    scale: float = 1.0

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians per token, float32 `[dim / 2]`."""
        exponents_R = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        plain_R = 1 / self.theta**exponents_R
        match self.kind:
            case "default":
                found_R = plain_R
            case "linear":
                found_R = plain_R / self.factor
            case "llama3":
                rotations_R = self.trained_length * plain_R / (2 * math.pi)
                kept_R = ((rotations_R - self.slow) / (self.fast - self.slow)).clamp(0, 1)
                found_R = (1 - kept_R) * plain_R / self.factor + kept_R * plain_R
            case "yarn":
                kept_R = 1 - self._ramp()
                found_R = plain_R / self.factor * (1 - kept_R) + plain_R * kept_R
            case _:
                assert_never(self.kind)
        return found_R.to(device)

    def _ramp(self) -> torch.Tensor:
        """Return how far each frequency is stretched, from 0 to 1."""
        low, high = self._index_of(self.fast), self._index_of(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        indices_R = torch.arange(self.dim // 2, dtype=torch.float32)
        return ((indices_R - low) / (high - low)).clamp(0, 1)

    def _index_of(self, rotations: float) -> float:
        """Return the index of the frequency with this number of rotations over the trained length."""
        return (
            self.dim * math.log(self.trained_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
        )


def rope_of(raw: Raw, head_dim: int, share: float = 1.0) -> Rope:
    """Return the embedding for heads of `head_dim`; config.json or `share` has the rotated part. Raises
    ModelError."""
    # Newer folders nest what older ones have at the top.
    scaling = nested(raw, "rope_parameters", "rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    reason = " rotates a text by its length, which cached pages do not follow" if kind == "longrope" else ""
    require(kind in KINDS, f"rope type {kind!r}{reason}: supported are {', '.join(KINDS)}")
    theta = number(scaling, "rope_theta", number(raw, "rope_theta", THETA))
    require(theta > 0, f"rope_theta is {theta}: a positive number is needed")
    share = number(scaling, "partial_rotary_factor", number(raw, "partial_rotary_factor", share))
    dim = int(head_dim * share)
    require(dim % 2 == 0, f"{dim} rotary dimensions of a head: the number must be even")
    rope = Rope(dim=dim, theta=theta)
    if kind in {"default", "dynamic"}:
        return rope
    longest = number(raw, "max_position_embeddings", 0)
    trained = number(scaling, "original_max_position_embeddings", longest)
    factor = number(scaling, "factor", longest / max(trained, 1))
    llama3 = kind == "llama3"
    return Rope(
        dim=dim,
        theta=rope.theta,
        kind=cast("Kind", kind),
        factor=factor,
        trained_length=int(trained),
        slow=number(scaling, "low_freq_factor" if llama3 else "beta_slow", 1.0),
        fast=number(scaling, "high_freq_factor" if llama3 else "beta_fast", 4.0 if llama3 else 32.0),
        truncate=bool(scaling.get("truncate", True)),
        scale=_yarn_scale(scaling, factor) if kind == "yarn" else 1.0,
    )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return by how much attention is more focused in a text that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_scale(scaling: Raw, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor", 1.0)
    weight, everywhere = (number(scaling, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if weight and everywhere:
        return yarn_mscale(factor, weight) / yarn_mscale(factor, everywhere)
    return yarn_mscale(factor)
