"""Files, modules and make targets that texts name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.test_prose import FILES, PAGES
from tests.tidy.test_tidy import ROOT

OF_OTHERS = {"grpc_tools.protoc", "pip", "pytest", "venv"}
"""Modules of the standard library and of other packages, which texts start with `python -m`."""

MODULE = re.compile(r"python3? -m ([a-zA-Z_][\w.]*\w)")
TARGET = re.compile(r"`make ([a-z][\w.-]*)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PATH = re.compile(
    r"(?<![\w/.-])((?:cluster|workers|kvstore|kernels|tests|benchmarks|tools|deploy|docs)/[\w./-]*\w\.\w+)"
)
MADE = re.compile(r"_pb2")
"""Files that a build writes."""


def text_files() -> Iterator[Path]:
    yield from PAGES
    yield from (path for path in FILES if path.parent != Path(__file__).parent)
    yield ROOT / "Makefile"


@pytest.fixture(params=sorted(text_files()), ids=lambda path: str(path.relative_to(ROOT)))
def text_file(request: pytest.FixtureRequest) -> Path:
    return request.param


def is_module(name: str) -> bool:
    """Return whether `python -m name` finds a file of this repository."""
    parts = name.split(".")
    file = ROOT / "src" if parts[0] == "tidemill" else ROOT
    file = file.joinpath(*parts)
    return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()


def test_python_modules_in_texts_exist(text_file: Path) -> None:
    named = set(MODULE.findall(text_file.read_text())) - OF_OTHERS
    assert not [name for name in named if not is_module(name)]


def test_make_targets_in_texts_exist(text_file: Path) -> None:
    targets = set(re.findall(r"^([\w.-]+(?: [\w.-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {name for line in targets for name in line.split()}
    assert not set(TARGET.findall(text_file.read_text())) - known


def test_paths_in_texts_exist(text_file: Path) -> None:
    text = text_file.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists() and not MADE.search(path)]
    if text_file.suffix == ".md":
        missing += [link for link in LINK.findall(text) if not (text_file.parent / link).exists()]
    assert not missing
