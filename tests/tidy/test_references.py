"""Files, modules and make targets that texts name exist."""

import re
from collections.abc import Callable, Iterable

from tests.tidy.tree import EVERYTHING, GENERATED, PAGES, ROOT, none

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

TEXTS = {
    **{page: (ROOT / page).read_text() for page in PAGES if page not in GENERATED},
    **{source.name: source.text for source in EVERYTHING if source.folder != "tests/tidy"},
    "Makefile": (ROOT / "Makefile").read_text(),
}


def missing(names: Callable[[str], Iterable[str]], exists: Callable[[str], bool]) -> list[str]:
    """Return the names in all texts that do not exist."""
    return [f"{file}: {name}" for file, text in TEXTS.items() for name in {*names(text)} if not exists(name)]


def is_module(name: str) -> bool:
    """Return whether `python -m name` finds a file of this repository."""
    parts = name.split(".")
    file = ROOT / "src" if parts[0] == "tidemill" else ROOT
    file = file.joinpath(*parts)
    return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()


def test_python_modules_in_texts_exist() -> None:
    none(missing(MODULE.findall, lambda name: name in OF_OTHERS or is_module(name)), "no such module")


def test_make_targets_in_texts_exist() -> None:
    lines = re.findall(r"^([\w.-]+(?: [\w.-]+)*):", TEXTS["Makefile"], re.MULTILINE)
    known = {name for line in lines for name in line.split()}
    none(missing(TARGET.findall, known.__contains__), "no such target in the Makefile")


def test_paths_in_texts_exist() -> None:
    none(
        missing(PATH.findall, lambda path: (ROOT / path).exists() or bool(MADE.search(path))),
        "no such file",
    )


def test_links_in_pages_exist() -> None:
    none(
        (
            f"{page}: {link}"
            for page in PAGES
            for link in LINK.findall((ROOT / page).read_text())
            if not (ROOT / page).parent.joinpath(link).exists()
        ),
        "no such page",
    )
