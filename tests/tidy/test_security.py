"""Rules of SECURITY.md that show in the source alone: what must not stand there."""

import ast
import re
import tomllib

from tests.tidy.tree import PRODUCT, ROOT, none

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


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_nothing_is_run_or_trusted_that_came_from_outside() -> None:
    found: list[str] = []
    for source in PRODUCT:
        used = [(node.lineno, node.attr) for node in source.nodes(ast.Attribute)]
        used += [(node.lineno, node.id) for node in source.nodes(ast.Name)]
        found += [f"{source.name}:{line}: {name} {NAMES[name]}" for line, name in used if name in NAMES]
        for node in source.nodes(ast.keyword):
            if node.arg in ARGUMENTS and not _is_false(node.value):
                found.append(f"{source.name}:{node.lineno}: {node.arg}: {ARGUMENTS[node.arg]}")
            if node.arg == "verify" and _is_false(node.value):
                found.append(f"{source.name}:{node.lineno}: verify=False takes any certificate")
    none(found, "nothing from outside is run or trusted")


def test_no_address_of_every_interface_is_written_down() -> None:
    none(
        (
            f"{source.name}:{node.lineno}"
            for source in PRODUCT
            if source.name != "kvstore/stores/bind_filter.py"  # looks for it in what others have bound
            for node in source.nodes(ast.Constant)
            if node.value in EVERYWHERE
        ),
        "an option asks for the addresses to bind",
    )


def test_requirements_are_pinned() -> None:
    """Every requirement of pyproject.toml has one version in constraints.txt, which CI installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned, names - pinned
