"""The table of tiles of the experts' products on CUDA."""

from typing import NamedTuple

from tidemill.kernels.shared.tiles import has_large


class ExpertTiles(NamedTuple):
    """The tiles of both products where an average expert has up to `pairs` pairs; None: any number. Each tile
    has `tokens`, and each product its columns, depth of a step, warps and stages."""

    pairs: float | None
    tokens: int
    gate_up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


TILES = (
    ExpertTiles(6, 16, (64, 64, 4, 4), (128, 64, 4, 4)),
    ExpertTiles(20, 32, (64, 64, 4, 4), (128, 64, 4, 4)),
    ExpertTiles(48, 64, (64, 64, 4, 4), (128, 64, 4, 4)),
    ExpertTiles(None, 128, (128, 64, 8, 4), (256, 64, 8, 4)),
)
"""Estimates; `benchmarks/gpu/sweep.py` prints these rows as it finds them on a device.

The weights are read once for each tile of an expert, but for what the second finds in the L2: a tile takes
most experts whole while reading is the cost. Three or two programs share a multiprocessor while weights are
streamed, which hides where each begins.
"""

CAPPED_TOKENS = 64  # of a tile of codes, since registers hold factors beside sums, or of little shared memory


def tiles_for(pairs: int, experts: int, *, codes: bool = False) -> ExpertTiles:
    """Return the row of the table, from the shapes: the number of tokens of each expert is only on the
    device."""
    capped = codes or not has_large()
    fits = [row for row in TILES if row.tokens <= CAPPED_TOKENS or not capped]
    return next((row for row in fits if row.pairs is None or pairs <= row.pairs * experts), fits[-1])
