"""The layout of the tree: small folders, imports that run one way, and what the edge may import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import groupby
from pathlib import Path

import pytest

from tests.tidy.test_tidy import FILES, LAYERS, ROOT, nodes

MODULES_MAX = 16

MAY_IMPORT = {
    "kvstore": "",
    "kvstore/memory": "kvstore",
    "kvstore/stores": "kvstore",
    "workers/sources": "kvstore",
    "workers": "kernels kvstore workers/sources",
    "workers/transfer": "kvstore workers",
    "workers/models": "kvstore",
    "workers/models/loading": "workers/models",
    "workers/models/layers": "kernels kvstore workers/models workers/models/loading",
    "workers/models/architectures": "kernels kvstore workers workers/models workers/sources",
    "workers/execution": "kernels kvstore workers workers/models",
    "workers/scheduling": "kvstore workers workers/execution workers/transfer",
    "workers/parallel": "kvstore workers workers/execution workers/models workers/transfer",
    "workers/engine": "kernels kvstore workers workers/sources",
    "cluster": "workers cluster/observability",
    "cluster/observability": "kvstore workers",
    "cluster/rpc": "kvstore workers cluster",
    "cluster/joining": "kvstore workers cluster cluster/rpc",
    "cluster/metrics": "workers cluster cluster/observability",
    "cluster/edge": "kvstore workers cluster cluster/observability cluster/rpc",
    "cluster/edge/chat": "kvstore workers cluster",
    "cluster/edge/chat/output": "workers cluster/edge/chat",
    "cluster/edge/chat/request": "workers cluster/edge/chat cluster/edge/chat/output",
    "cluster/edge/requests": (
        "kvstore workers cluster cluster/edge cluster/edge/chat cluster/metrics cluster/observability"
    ),
    "cluster/edge/http": ("kvstore workers cluster cluster/edge/chat cluster/edge/requests cluster/metrics"),
    "cluster/edge/grpc_api": "kvstore workers cluster/edge/chat cluster/edge/requests cluster/rpc",
    "cluster/router": "kernels/shared workers workers/scheduling cluster cluster/rpc",
    "cluster/worker": (
        "kvstore workers workers/parallel workers/scheduling cluster cluster/observability cluster/rpc"
    ),
    "cluster/supervisor": (
        "kernels/shared kvstore workers workers/engine workers/parallel cluster cluster/observability "
        "cluster/joining cluster/router cluster/rpc cluster/worker"
    ),
    "cluster/server": (
        "kvstore workers workers/engine cluster cluster/edge cluster/joining cluster/metrics "
        "cluster/observability cluster/rpc cluster/supervisor"
    ),
    "cluster/offline": "kvstore workers workers/engine workers/models workers/sources cluster/edge/chat",
    "cluster/config": (
        "kvstore workers workers/models workers/sources cluster cluster/edge/chat cluster/observability"
    ),
    "cluster/simulate": "kvstore workers cluster cluster/edge cluster/router",
    "cluster/bench": "kvstore cluster/simulate",
    "cluster/plan": "kvstore workers cluster/bench cluster/config cluster/simulate",
    "cluster/cli": (
        "kvstore workers cluster cluster/bench cluster/cli/options cluster/config cluster/edge/requests "
        "cluster/joining cluster/metrics cluster/observability cluster/server cluster/simulate "
        "cluster/supervisor"
    ),
    "cluster/cli/options": "kvstore cluster/bench cluster/config cluster/plan cluster/simulate",
}
"""The folders that the modules of a folder may import from, in addition to their own.

A folder includes those below it, except `cluster`, which means its own modules only. `kernels`
imports nothing of ours.
"""


def folder_of(path: Path) -> str:
    return str(path.relative_to(ROOT).parent)


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],  # noqa: S607 - whichever git there is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in names.split()]


def test_folders_have_few_modules() -> None:
    modules = sorted(path for path in tracked() if path.name != "__init__.py" and path.exists())
    for folder, group in groupby(sorted(modules, key=folder_of), folder_of):
        names = [path.name for path in group]
        assert len(names) <= MODULES_MAX, f"{folder} has {len(names)} modules: split it, or delete some"


def imported(path: Path) -> Iterator[Path]:
    """The product files that a file imports, wherever in it."""
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "tidemill" and len(parts) > 1 and parts[1] in LAYERS:
                there = ROOT.joinpath(*parts[1:])
                modules = (there.with_suffix(".py"), there / "__init__.py", there.parent.with_suffix(".py"))
                yield next((path for path in modules if path.exists()), there.parent / "__init__.py")


@pytest.mark.parametrize("layer", LAYERS)
def test_no_folder_imports_in_a_circle(layer: str) -> None:
    """Checked at every level: between the subfolders of a folder, and its own modules."""
    folders = {ROOT / layer, *(path.parent for path in FILES if path.is_relative_to(ROOT / layer))}
    for folder in sorted(folders):
        graph: dict[str, set[str]] = {}
        for path in (path for path in FILES if path.is_relative_to(folder)):
            here = _child(folder, path)
            inside = (other for other in imported(path) if other.is_relative_to(folder))
            graph.setdefault(here, set()).update({_child(folder, other) for other in inside} - {here})
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _child(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else "its own modules"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_import_what_they_may(path: Path) -> None:
    here = folder_of(path)
    if here.startswith("kernels"):
        assert {other.relative_to(ROOT).parts[0] for other in imported(path)} <= {"kernels"}
        return
    allowed = [*MAY_IMPORT[here.removesuffix("/proto")].split(), "cluster/rpc/proto"]
    for other in imported(path):
        there = folder_of(other)
        assert there == here or _is_allowed(there, allowed), (
            f"{there} is not in MAY_IMPORT[{here!r}] of {Path(__file__).relative_to(ROOT)}"
        )


def _is_allowed(there: str, allowed: list[str]) -> bool:
    """Return whether the folder, or one above it, is in the list; `cluster` means its own modules only."""
    if there in allowed:
        return True
    above = there.rpartition("/")[0]
    return bool(above) and above != "cluster" and _is_allowed(above, allowed)


def test_contracts_name_folders_that_exist() -> None:
    named = {*MAY_IMPORT, *(folder for allowed in MAY_IMPORT.values() for folder in allowed.split())}
    assert not [folder for folder in named if not (ROOT / folder).is_dir()]


EDGE = ("cluster/edge", "cluster/rpc", "cluster/metrics", "cluster/observability")
BLOCKED = ("ray", "torch", "transformers")
IMPORT_ALL = """
import sys
from importlib import import_module

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"the edge imports {{name}}")

sys.meta_path.insert(0, Block())
for name in {modules}:
    import_module(name)
"""


def test_edge_runs_without_ray_torch_and_transformers() -> None:
    """Each of its modules is imported in a process where these cannot be."""
    optional = ROOT / "cluster/observability/otel.py"  # loaded on demand, with an extra of its own
    paths = [path for path in FILES if folder_of(path).startswith(EDGE) and path != optional]
    modules = [
        ".".join(("tidemill", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in paths
    ]
    code = IMPORT_ALL.format(blocked=BLOCKED, modules=modules)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_architecture_draws_every_folder() -> None:
    """The tree of ARCHITECTURE.md is the tree on disk, by path."""
    drawn: set[str] = set()
    parents: list[str] = []
    for line in (ROOT / "ARCHITECTURE.md").read_text().partition("## Folders")[2].splitlines():
        name = line.split()[0] if line.split() else ""
        depth = (len(line) - len(line.lstrip())) // 2
        if name.endswith("/") and len(parents) >= depth:
            parents[depth:] = [name]
            drawn.add("".join(parents))
    files = {
        path for layer in LAYERS for path in (ROOT / layer).rglob("*.*") if "__pycache__" not in path.parts
    }
    assert drawn == {f"{path.parent.relative_to(ROOT)}/" for path in files}
