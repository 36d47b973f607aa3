"""The layout of the tree: small folders, imports that run one way, and what the edge may import."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.tidy.tree import EVERYTHING, LAYERS, PRODUCT, ROOT, Source, none

MODULES_MAX = 16

MAY_IMPORT = {
    "kvstore": "",
    "kvstore/memory": "kvstore",
    "kvstore/stores": "kvstore",
    "connect": "kvstore",
    "workers/sources": "kvstore",
    "workers": "kernels kvstore workers/sources",
    "workers/transfer": "kvstore workers",
    "workers/models": "kernels/shared kvstore",
    "workers/models/loading": "kernels/linear kernels/shared kvstore workers/models workers/sources",
    "workers/models/layers": "kernels kvstore workers/models workers/models/loading",
    "workers/models/architectures": "kernels kvstore workers workers/models workers/sources",
    "workers/execution": "kernels kvstore workers workers/models",
    "workers/scheduling": "kvstore workers workers/execution workers/transfer",
    "workers/parallel": "kvstore workers workers/execution workers/models workers/transfer",
    "workers/contract": "workers workers/parallel workers/scheduling",
    "workers/engine": "kernels kvstore workers workers/sources",
    "workers/vllm": "kvstore workers workers/models workers/sources",
    "cluster": "workers cluster/observability",
    "cluster/observability": "kvstore workers",
    "cluster/rpc": "kvstore workers cluster cluster/observability",
    "cluster/quotas": "workers cluster cluster/rpc",
    "cluster/metrics": "kvstore workers cluster cluster/observability",
    "cluster/edge": "kvstore workers cluster cluster/observability cluster/rpc",
    "cluster/edge/chat": "kvstore workers workers/models cluster",
    "cluster/edge/chat/output": "workers cluster/edge/chat",
    "cluster/edge/chat/request": "workers cluster/edge/chat cluster/edge/chat/output",
    "cluster/edge/records": "kvstore workers",
    "cluster/edge/requests": (
        "kvstore workers cluster cluster/edge cluster/edge/chat cluster/metrics cluster/observability "
        "cluster/quotas"
    ),
    "cluster/edge/apis": "kvstore workers cluster/edge/chat cluster/edge/records cluster/edge/requests",
    "cluster/edge/http": (
        "kvstore workers cluster cluster/edge/apis cluster/edge/chat cluster/edge/records "
        "cluster/edge/requests cluster/metrics"
    ),
    "cluster/edge/grpc_api": (
        "kvstore workers cluster cluster/edge/apis cluster/edge/chat cluster/edge/requests cluster/rpc"
    ),
    "cluster/router": "kernels/shared kvstore workers workers/scheduling cluster cluster/quotas cluster/rpc",
    "cluster/worker": (
        "kvstore workers workers/parallel workers/scheduling cluster cluster/observability cluster/rpc"
    ),
    "cluster/processes": (
        "kernels/shared kvstore workers workers/engine workers/parallel cluster cluster/edge "
        "cluster/metrics cluster/observability cluster/processes cluster/quotas cluster/router cluster/rpc "
        "cluster/worker"
    ),
    "cluster/processes/endpoint": (
        "kvstore workers cluster cluster/edge cluster/metrics cluster/observability "
        "cluster/processes/system cluster/rpc"
    ),
    "cluster/processes/joining": "kvstore workers cluster cluster/rpc",
    "cluster/processes/scaling": "kvstore workers cluster cluster/processes/joining",
    "cluster/processes/system": "kvstore",
    "cluster/offline": (
        "kvstore workers workers/engine workers/models workers/sources cluster/config cluster/edge/chat"
    ),
    "cluster/config": (
        "kvstore workers workers/models workers/sources cluster cluster/edge/chat cluster/observability"
    ),
    "cluster/simulate": "kvstore workers cluster cluster/edge cluster/router",
    "cluster/bench": "kvstore cluster/simulate",
    "cluster/plan": "kernels/shared kvstore workers cluster/bench cluster/config cluster/simulate",
    "cluster/cli": (
        "kvstore workers cluster cluster/bench cluster/cli/options cluster/config cluster/edge/records "
        "cluster/edge/requests cluster/metrics cluster/observability cluster/processes cluster/simulate"
    ),
    "cluster/cli/options": (
        "kernels/shared kvstore workers cluster/bench cluster/config cluster/plan cluster/simulate"
    ),
}
"""The folders that the modules of a folder may import from, in addition to their own.

A folder includes those below it, except `cluster`, which means its own modules only. `kernels`
imports nothing of ours.
"""


def test_folders_have_few_modules() -> None:
    modules = Counter(source.folder for source in EVERYTHING if not source.name.endswith("__init__.py"))
    none(
        (f"{folder} has {count}" for folder, count in modules.items() if count > MODULES_MAX),
        f"a folder has at most {MODULES_MAX} modules: split it, or delete some",
    )


PATHS = {source.name for source in PRODUCT}


@cache
def imported(source: Source) -> frozenset[str]:
    """Return the product files that a file imports, wherever in it."""
    names = [alias.name for node in source.nodes(ast.Import) for alias in node.names]
    froms = (node for node in source.nodes(ast.ImportFrom) if node.module)
    names += [f"{node.module}.{alias.name}" for node in froms for alias in node.names]
    ours = (name.split(".")[1:] for name in names if name.startswith("tidemill."))
    return frozenset(_file(parts) for parts in ours if parts and parts[0] in LAYERS)


def _file(parts: list[str]) -> str:
    there, above = "/".join(parts), "/".join(parts[:-1])
    modules = (f"{there}.py", f"{there}/__init__.py", f"{above}.py")
    return next((name for name in modules if name in PATHS), f"{above}/__init__.py")


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def test_no_folder_imports_in_a_circle() -> None:
    """Checked at every level: between the subfolders of a folder, and its own modules."""
    folders = {"/".join(parts[: n + 1]) for parts in map(_parts, PATHS) for n in range(len(parts) - 1)}
    none(
        (
            f"{folder}: {' imports '.join(circle)}"
            for folder in sorted(folders)
            for circle in _circles(folder)
        ),
        "no imports in a circle",
    )


def _parts(name: str) -> list[str]:
    return name.split("/")


def _circles(folder: str) -> Iterator[list[str]]:
    graph: dict[str, set[str]] = {}
    inside = f"{folder}/"
    for source in PRODUCT:
        if source.name.startswith(inside):
            here = _child(inside, source.name)
            others = {_child(inside, other) for other in imported(source) if other.startswith(inside)}
            graph.setdefault(here, set()).update(others - {here})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield error.args[1][::-1]


def _child(folder: str, name: str) -> str:
    first, slash, _ = name.removeprefix(folder).partition("/")
    return first if slash else "its own modules"


def test_folders_import_what_they_may() -> None:
    found: list[str] = []
    for source in PRODUCT:
        here = source.folder
        for there in sorted({_folder(other) for other in imported(source)}):
            if here.startswith("kernels"):
                allowed = there.startswith("kernels")
            else:
                listed = [*MAY_IMPORT.get(here.removesuffix("/proto"), "").split(), "cluster/rpc/proto"]
                allowed = there == here or _is_allowed(there, listed)
            if not allowed:
                found.append(f"{source.name}: {there} is not in MAY_IMPORT[{here!r}]")
    none(found, "import what MAY_IMPORT in tests/tidy/test_layout.py lists, or list it")


def _is_allowed(there: str, allowed: list[str]) -> bool:
    """Return whether the folder, or one above it, is in the list; `cluster` means its own modules only."""
    if there in allowed:
        return True
    above = there.rpartition("/")[0]
    return bool(above) and above != "cluster" and _is_allowed(above, allowed)


def test_contracts_name_folders_that_exist() -> None:
    named = {*MAY_IMPORT, *(folder for allowed in MAY_IMPORT.values() for folder in allowed.split())}
    none(
        (folder for folder in named if not (ROOT / folder).is_dir()), "MAY_IMPORT names folders that are gone"
    )


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
    optional = "cluster/observability/otel.py"  # loaded on demand, with an extra of its own
    paths = [source.name for source in PRODUCT if source.folder.startswith(EDGE) and source.name != optional]
    modules = [f"tidemill.{name.removesuffix('.py').replace('/', '.')}" for name in paths]
    modules = [module.removesuffix(".__init__") for module in modules]
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
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in files}
    none(drawn ^ folders, "draw the folders of ARCHITECTURE.md as they are; these are gone or missing")
