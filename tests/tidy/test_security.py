"""Rules of SECURITY.md that show in the source alone: what must not stand there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.tidy.test_tidy import FILES, ROOT, nodes

NAMES = {
    "recv_pyobj": "unpickles what a socket sends",
    "send_pyobj": "makes others unpickle",
    "_create_unverified_context": "takes any certificate",
    "SimpleCookie": "keys come in headers alone",
}
ARGUMENTS = {
    "allow_pickle": "a file becomes code",
    "trust_remote_code": "a model folder becomes code",
    "shell": "a name becomes a command",
}
"""The options that must never be anything but False."""

EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - not bound unless an option asks for it


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(ROOT)))
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_nothing_is_run_or_trusted_that_came_from_outside(path: Path) -> None:
    for node in nodes(path):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        assert name not in NAMES, NAMES[str(name)]
        if isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            assert isinstance(node.value, ast.Constant), ARGUMENTS[node.arg]
            assert node.value.value is False, ARGUMENTS[node.arg]
        if isinstance(node, ast.keyword) and node.arg == "verify":
            assert not (isinstance(node.value, ast.Constant) and node.value.value is False)


def test_no_address_of_every_interface_is_written_down(path: Path) -> None:
    looks_for_it = path == ROOT / "kvstore/stores/bind_filter.py"  # in what others have bound
    for node in nodes(path):
        assert looks_for_it or not (isinstance(node, ast.Constant) and node.value in EVERYWHERE)


def test_requirements_are_pinned() -> None:
    """Every requirement of pyproject.toml has one version in constraints.txt, which CI installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned, names - pinned
