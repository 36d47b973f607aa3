"""Released models with some of their layers and no values, for what a device would be asked to do."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.engine.released import RELEASED

from tests.support.kernels.launched import META
from tidemill.kernels.dispatch import operators
from tidemill.kernels.linear import factors
from tidemill.kernels.linear.stored import FOUR_BITS, CodeKind, Stored, plain
from tidemill.kvstore.layout import layout_of
from tidemill.workers.models.architectures.config import local, weights_of
from tidemill.workers.models.architectures.decoder import Decoder
from tidemill.workers.models.architectures.registry import ARCHITECTURES
from tidemill.workers.models.collectives import ALONE, Ranks
from tidemill.workers.models.inputs import Caches, Inputs, caches_of, one_run
from tidemill.workers.models.loading.sharding import RankPart

LAYERS = 6  # of every kind that the models have
PAGE_TOKENS = 64
GROUP = 32


def narrowed(scales: torch.Tensor) -> torch.Tensor:
    """The part of `factors.narrowed` that reads no values."""
    return scales.transpose(-1, -2).bfloat16()


def released(
    name: str,
    part: RankPart | None = None,
    ranks: Ranks = ALONE,
    *,
    counts: bool = False,
    kind: CodeKind | None = None,
) -> tuple[Decoder, Caches]:
    """Return the part of a rank of a model, in bfloat16, or with projections, experts and head of codes."""
    part = part or RankPart()
    raw: dict[str, Any] = RELEASED[name] | {"num_hidden_layers": LAYERS}
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:LAYERS]
    config = ARCHITECTURES[raw["architectures"][0]].parse(raw)
    weights, own = weights_of(config), local(config, part)

    def read(tensor: str) -> Stored:
        weight = weights[tensor]
        piece = weight.part(part)
        shape = list(weight.shape)
        shape[piece.dim] = sum(end - start + piece.zeros for start, end in piece.ranges)
        if (
            kind is not None
            and any(part in tensor for part in ("_proj", "lm_head"))
            and shape[1] % GROUP == 0
        ):
            columns = shape[1] // 2 if kind in FOUR_BITS else shape[1]
            dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
            scales = torch.empty(shape[0], shape[1] // GROUP, device=META)
            return Stored(torch.empty(shape[0], columns, dtype=dtype, device=META), kind, scales)
        return plain(torch.empty(shape, dtype=torch.bfloat16, device=META))

    with mock.patch.object(factors, "narrowed", narrowed):
        model = Decoder(own, read, operators("triton", Path()), ranks, sums=part.sums, counts=counts)
    layout = layout_of(own.specs, PAGE_TOKENS, "bfloat16")
    return model, caches_of(layout, torch.empty(8 * layout.extent_bytes, dtype=torch.uint8, device=META))


def there(inputs: Inputs, device: torch.device) -> Inputs:
    """on_device, of memory that cannot be pinned."""
    assert device == META
    return one_run(inputs, device)[1]
