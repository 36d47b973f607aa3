"""The scales of keys and values that a folder has for pages of FP8, by the names of AutoFP8,
compressed-tensors and ModelOpt."""

import logging
from collections.abc import Sequence
from math import frexp
from typing import NamedTuple

from tidemill.kernels.shared.fp8 import BIAS, SCALE_MAX, SCALE_MIN
from tidemill.workers.models.loading.checkpoint import WeightsFolder

log = logging.getLogger(__name__)

KEYS = "self_attn.k_scale", "self_attn.k_proj.k_scale"
VALUES = "self_attn.v_scale", "self_attn.v_proj.v_scale"


class KvScales(NamedTuple):
    """The bytes of the scales of a layer (kernels/shared/fp8.py)."""

    key: int = BIAS
    value: int = BIAS


def kv_scales(folder: WeightsFolder, layers: Sequence[str]) -> tuple[KvScales, ...]:
    """Return the scales of the layers with these prefixes, each the least power of two that is not below that
    of the folder; 1 where it has none. Log how many have one. Raises ModelError."""
    found = [[_scale(folder, layer, names) for names in (KEYS, VALUES)] for layer in layers]
    having = sum(None not in pair for pair in found)
    log.info("pages of FP8: %d of %d layers have scales in the folder, others 1", having, len(layers))
    return tuple(KvScales(*(BIAS if scale is None else _byte(scale) for scale in pair)) for pair in found)


def _scale(folder: WeightsFolder, layer: str, names: Sequence[str]) -> float | None:
    known = [f"{layer}{name}" for name in names if f"{layer}{name}" in folder.names]
    return folder.number(known[0], "--kv-cache-dtype to fp8_per_token_head") if known else None


def _byte(scale: float) -> int:
    half, exponent = frexp(min(scale, 2.0**BIAS))
    return max(SCALE_MIN, min(exponent - (half == 0.5) + BIAS, SCALE_MAX))
