"""vLLM under our router and over our page stores, beside vLLM alone: figures with their goals.

python -m benchmarks.engines --vllm PYTHON --folder FOLDER [NAME ...]

PYTHON has vLLM 0.32 for CPUs (`make_vllm` of benchmarks/peers makes one), and for the connector blake3 and
xxhash. FOLDER keeps the model. It measures the groups of that NAME, or all, prints their figures, and keeps
them in `engines.jsonl` of benchmarks/results instead of earlier ones of the same group.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.engines.ours import killed, under_our_router
from benchmarks.engines.scene import Figure, Scene
from benchmarks.engines.stored import stored
from benchmarks.rows import Row, read_rows, write_rows

GROUPS: dict[str, Callable[[Scene], Iterable[Figure]]] = {
    "router": under_our_router,
    "kill": killed,
    "connector": stored,
}
"""The measurement of each group of figures."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(GROUPS), help=", ".join(GROUPS))
    options = parser.parse_args()
    if unknown := {*options.names} - {*GROUPS}:
        parser.error(f"the groups are {', '.join(GROUPS)}, not {', '.join(unknown)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    scene = Scene(options.vllm, options.folder.resolve())
    for name in options.names:
        rows = [_row(name, figure) for figure in GROUPS[name](scene)]
        kept = [row for row in read_rows("engines") if row["group"] != name]
        write_rows("engines", "python -m benchmarks.engines --vllm PYTHON --folder FOLDER", [*kept, *rows])


def _row(group: str, figure: Figure) -> Row:
    verdict = "reached" if figure.value <= figure.goal else "missed"
    print(f"{figure.name}: {figure.value:.4g}, goal {figure.goal:g}: {verdict}; {figure.details}", flush=True)
    return {"group": group, **figure._asdict()}


if __name__ == "__main__":
    main()
