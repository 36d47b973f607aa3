"""Time both products of Qwen3-Next's experts with many tilings, and print the fastest ones.

    python -m benchmarks.gpu.sweep --folder FOLDER [--limit-s 50] [--tiny]

Processes compile all tilings first, each some of them. What is printed last are the rows of TILES in
`kernels/moe/tiles.py`. FOLDER/sweep.json has all figures.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.kernels import Stopwatch
from benchmarks.gpu.works import TINY, Call, Shape, normal
from tidemill.kernels.dispatch import operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.moe import tiles
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing
from tidemill.kernels.moe.tiles import ExpertTiles

TOKENS = (32, 128, 512, 8192)
PROCESSES = max(1, (os.cpu_count() or 2) - 2)


class Tiling(NamedTuple):
    """The tokens of a tile, and columns, depth of a step, warps and stages of one product."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.columns, self.depth, self.warps, self.stages


TILINGS = [
    *(Tiling(m, n, 64, 4, stages) for m, n, stages in product((16, 32, 64), (64, 128), (3, 4, 5))),
    *(Tiling(64, n, depth, 8, 3) for n, depth in product((128, 256), (64, 128))),
    *(Tiling(128, n, 64, 8, stages) for n, stages in product((128, 256), (3, 4))),
]


class Timed(NamedTuple):
    tokens: int
    tiling: Tiling
    took_s: dict[str, float]


class Products:
    """Both products of the experts, each with a tiling of its own."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._shape = shape
        self._ops = operators("triton", folder)
        gate_up = self._ops.pack([plain(normal(shape.experts, 2 * shape.inner, shape.hidden))], None)
        down = self._ops.pack([plain(normal(shape.experts, shape.hidden, shape.inner))], None)
        self._experts = Experts(gate_up, down)

    def calls(self, tokens: int, tiling: Tiling) -> Iterator[tuple[str, Call]]:
        """Yield the name and the call of each product."""
        ops, shape, sizes = self._ops, self._shape, tiling.sizes
        x, logits = normal(tokens, shape.hidden), normal(tokens, shape.experts)
        with mock.patch.object(tiles, "TILES", (ExpertTiles(None, tiling.tokens, sizes, sizes),)):
            choice = ops.route(logits, Routing(shape.top_k, renormalise=True))
            hidden = ops.moe_inner(x, choice, self._experts)
            yield "gate_up", lambda: ops.moe_inner(x, choice, self._experts)
            yield "down", lambda: ops.moe_outer(hidden, choice, self._experts, None, None)


def worth(tiling: Tiling, tokens: int, shape: Shape) -> bool:
    """Return whether tiles are neither much larger than what experts get nor much smaller."""
    pairs = tokens * shape.top_k / shape.experts
    return tiling.tokens <= max(16, 8 * pairs) and tiling.tokens * 8 >= min(pairs, 512)


def compile_all(folder: Path, limit_s: float) -> None:
    command = (sys.executable, "-m", "benchmarks.gpu.sweep", "--folder", str(folder), "--compile")
    children = [subprocess.Popen((*command, str(part))) for part in range(PROCESSES)]  # noqa: S603
    for child in children:
        child.wait(limit_s)


def timed(products: Products, watch: Stopwatch, work: list[tuple[int, Tiling]], end_s: float) -> list[Timed]:
    found: list[Timed] = []
    for tokens, tiling in work:
        if time.monotonic() > end_s:
            print("stopped: what is missing was not begun")
            break
        try:
            took = {name: watch.seconds(call) for name, call in products.calls(tokens, tiling)}
        except Exception as error:  # noqa: BLE001 - a tiling that does not fit is not chosen
            print(f"{tokens:6} {tiling}: {error!r:.80}", flush=True)
            continue
        found.append(Timed(tokens, tiling, took))
    return found


def table(found: list[Timed], shape: Shape) -> list[ExpertTiles]:
    """Return the rows of the fastest tiles. A row reaches halfway, as a factor, to the next number of tokens
    that was timed. Both products have tiles of the same tokens."""
    rows: list[ExpertTiles] = []
    counts = sorted({row.tokens for row in found})
    for tokens, following in zip(counts, [*counts[1:], None], strict=True):
        best: dict[int, dict[str, Timed]] = {}
        for row in found:
            if row.tokens == tokens:
                of_tile = best.setdefault(row.tiling.tokens, {})
                for name in ("gate_up", "down"):
                    of_tile[name] = min(of_tile.get(name, row), row, key=lambda row: row.took_s[name])
        size, fastest = min(best.items(), key=lambda item: sum(t.took_s[name] for name, t in item[1].items()))
        pairs = None if following is None else (tokens * following) ** 0.5 * shape.top_k / shape.experts
        gate_up, down = (fastest[name].tiling.sizes for name in ("gate_up", "down"))
        rows.append(ExpertTiles(pairs and round(pairs, 1), size, gate_up, down))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", type=int, help="compile the tilings of one process")
    args = parser.parse_args()
    if args.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    end_s, device = time.monotonic() + args.limit_s, torch.device("cpu" if args.tiny else "cuda")
    torch.set_default_device(device)
    shape, sizes = (TINY, (3,)) if args.tiny else (Shape(), TOKENS)
    work = [(tokens, tiling) for tokens in sizes for tiling in TILINGS if worth(tiling, tokens, shape)]
    products = Products(shape, args.folder)
    if args.compile is not None:
        for tiling in list(dict.fromkeys(tiling for _, tiling in work))[args.compile :: PROCESSES]:
            for _, call in products.calls(sizes[0], tiling):
                call()
        return
    if not args.tiny:
        compile_all(args.folder, args.limit_s)
        print(f"compiled, {end_s - time.monotonic():.0f} s are left", flush=True)
    found = timed(products, Stopwatch(device), work, end_s)
    (args.folder / "sweep.json").write_text(json.dumps(found))
    for tokens, name in product(sizes, ("gate_up", "down")):
        rows = sorted((row for row in found if row.tokens == tokens), key=lambda row: row.took_s[name])
        for row in rows[:3]:
            print(f"{tokens:6} {name:8} {1e6 * row.took_s[name]:9.1f} us  {row.tiling}")
    print("TILES = (", *(f"    {row!r}," for row in table(found, shape)), ")", sep="\n")


if __name__ == "__main__":
    main()
