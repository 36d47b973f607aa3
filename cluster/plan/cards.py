"""The cards that a plan may use: data sheets, and the step times that follow from them. Pure.

No worker has measured these times. They are rooflines: each part of a step takes the larger part of what its
data sheet promises for the bytes that it reads or the operations that it does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.kvstore.layout import Layout
from tidemill.workers.messages import Speed

if TYPE_CHECKING:  # imports torch
    from tidemill.workers.models.architectures.registry import ModelSizes

HERE = "here"
"""The name of this machine among the cards."""

BANDWIDTH_SHARE, FLOPS_SHARE = 0.7, 0.5
"""The shares of the bandwidth and of the operations of a data sheet that kernels reach."""

STEP_S = 1e-3
"""The time of a step beside its kernels: planning, inputs, launch."""

ALL_REDUCE_S = 15e-6
"""The time of one exchange between ranks, of which each layer has two."""

STORE_BYTES_PER_S = 10e9
REQUEST_S = 5e-3
"""The time of a request in edges and router."""

STEP_BYTES, GRAPH_BYTES = 2 << 30, 1 << 30
"""The memory of the largest step and of CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A data sheet: the usable memory, the dense bfloat16 operations per second and the bytes per second."""

    name: str
    memory_bytes: int
    flops_per_s: float
    bytes_per_s: float


CARDS = {
    card.name: card
    for card in (
        Card(name="a100", memory_bytes=79 << 30, flops_per_s=312e12, bytes_per_s=2.0e12),
        Card(name="b200", memory_bytes=178 << 30, flops_per_s=2250e12, bytes_per_s=8.0e12),
        Card(name="h100", memory_bytes=79 << 30, flops_per_s=989e12, bytes_per_s=3.35e12),
        Card(name="h200", memory_bytes=140 << 30, flops_per_s=989e12, bytes_per_s=4.8e12),
        Card(name="l40s", memory_bytes=44 << 30, flops_per_s=362e12, bytes_per_s=0.864e12),
    )
}


def roofline(card: Card, model: "ModelSizes", layout: Layout, ranks: int, context_tokens: float) -> Speed:
    """Return the speed of a worker of `ranks` cards, whose streams have `context_tokens`; `layout` is that of
    one rank. A step reads all weights, also of experts: with many streams nearly all of them are used."""
    bytes_per_s, flops_per_s = card.bytes_per_s * BANDWIDTH_SHARE, card.flops_per_s * FLOPS_SHARE * ranks
    exchanges = 2 * len(model.layers) * (ranks > 1)
    token_s = model.cost.token_flops / flops_per_s
    stream_bytes = context_tokens * layout.page_bytes / layout.page_tokens + 2 * layout.state_bytes
    return Speed(
        step_s=STEP_S + model.weight_bytes / ranks / bytes_per_s + exchanges * ALL_REDUCE_S,
        token_s=token_s,
        pair_s=model.cost.context_flops / flops_per_s,
        row_s=token_s + stream_bytes / bytes_per_s,
        fetch_bytes_per_s=STORE_BYTES_PER_S,
    )
