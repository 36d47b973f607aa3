"""Time the operators and write results/kernels.jsonl.

    python -m benchmarks.kernels [--quick]

All is CPU time of one thread, the best of a few turns, sides in turn: a busy machine disturbs ratios little.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.kernels.clock import Roofline
from benchmarks.kernels.operators import operators
from benchmarks.rows import write_rows
from tidemill.kernels.dispatch import operators as our_operators


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    budget_seconds = 0.02 if options.quick else 0.15
    ours, half = (our_operators("cpu", options.cache_dir, dtype) for dtype in ("float32", "bfloat16"))
    with torch.inference_mode():
        rows = operators(ours, half, Roofline(budget_seconds), budget_seconds)
    if not options.quick:
        write_rows("kernels", "python -m benchmarks.kernels", rows)


if __name__ == "__main__":
    main()
