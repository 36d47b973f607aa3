"""Time products with each kind of stored weights and write results/kinds.jsonl.

    python -m benchmarks.kernels.kinds [--quick]

CPU time of one thread, the best of a few turns, kinds in turn.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels.clock import best_seconds
from benchmarks.rows import Row, write_rows
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.stored import FOUR_BITS, Kind, Stored, plain

KINDS: dict[str, tuple[Kind, int, bool]] = {
    "bfloat16": ("bfloat16", 0, False),
    "INT8 by rows": ("int8", 0, False),
    "INT8 with INT8 activations": ("w8a8", 0, False),
    "FP8 by rows": ("fp8", 0, False),
    "FP8 in blocks of 128": ("fp8", 128, False),
    "INT4, groups of 128": ("int4", 128, False),
    "INT4, groups of 32 (Q4_0)": ("int4", 32, False),
    "INT4 with zero points, groups of 128 (AWQ)": ("uint4", 128, True),
    "MXFP4": ("fp4", 32, False),
    "NVFP4": ("fp4", 16, False),
}
"""Their codes, the columns that share a scale (0 for all), and whether there are offsets."""
SIZES = (768, 2048), (4096, 4096)  # inputs and outputs: weights of 3 and 32 MiB in bfloat16
ROWS = 1, 8, 32, 512
TURNS = 3


def weights(kind: Kind, columns: int, group: int, rows: int, *, shifted: bool) -> Stored:
    if kind == "bfloat16":
        return plain(torch.randn(rows, columns).bfloat16())
    if kind == "fp8":
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    elif kind in FOUR_BITS:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    else:
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, columns // (group or columns)) + 0.01
    return Stored(codes, kind, scales, -8 * scales if shifted else None)


def measured(ops: Operators, budget_seconds: float) -> list[Row]:
    rows: list[Row] = []
    for columns, out in SIZES:
        packed = {
            name: ops.pack([weights(kind, columns, group, out, shifted=shifted)], None)
            for name, (kind, group, shifted) in KINDS.items()
        }
        found: dict[str, Row] = {
            name: {"kind": name, "inputs x outputs": f"{columns:,} x {out:,}"} for name in packed
        }
        for count in ROWS:
            x = torch.randn(count, columns)
            calls = {name: partial(ops.linear, x, weight) for name, weight in packed.items()}
            seconds = best_of(calls, budget_seconds)
            for name, row in found.items():
                row[f"{count} rows, µs" if count > 1 else "1 row, µs"] = round(1e6 * seconds[name])
                row[f"bfloat16 / it, {count}"] = f"{seconds['bfloat16'] / seconds[name]:.2f}"
        rows += found.values()
    return rows


def best_of(calls: Mapping[str, Callable[[], object]], budget_seconds: float) -> dict[str, float]:
    turns = [{name: best_seconds(call, budget_seconds) for name, call in calls.items()} for _ in range(TURNS)]
    return {name: min(turn[name] for turn in turns) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.kinds", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = measured(operators("cpu", options.cache_dir, "bfloat16"), 0.01 if options.quick else 0.1)
    for row in rows:
        print(" | ".join(map(str, row.values())))
    if not options.quick:
        write_rows("kinds", "python -m benchmarks.kernels.kinds", rows)


if __name__ == "__main__":
    main()
