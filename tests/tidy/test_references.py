"""Files, modules, make targets, decisions and headings that texts name exist."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator

from tests.tidy.tree import EVERYTHING, GENERATED, PAGES, ROOT, Source, none

OF_OTHERS = {"grpc_tools.protoc", "pip", "pytest", "venv"}
"""Modules of the standard library and of other packages, which texts start with `python -m`."""

MODULE = re.compile(r"python3? -m ([a-zA-Z_][\w.]*\w)")
TARGET = re.compile(r"`make ([a-z][\w.-]*)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:\s]*)#([^)]*)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
DECISION = re.compile(r"\b[Dd]ecisions?\s+(\d+)\b(?!\.\d)")
PATH = re.compile(
    r"(?<![\w/.-])((?:cluster|connect|workers|kvstore|kernels|tests|benchmarks|tools|deploy|docs)/[\w./-]*\w\.\w+)"
)
MADE = re.compile(r"_pb2")
"""Files that a build writes."""

BARE_FILE = re.compile(r"(?<![\w/.*{}<>$-])(\w+\.py)(?![\w/*-])")
CLASS = re.compile(r"`([A-Z][A-Za-z]*[a-z]\w*)`")
NOT_OURS = {"fused_moe.py", "gpu_works.py", "Origin", "Unreleased"}
"""Files of others, a header of HTTP and a heading of the changelog."""

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


def anchor(heading: str) -> str:
    """Return the name that GitHub and the documentation site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_headings_in_links_exist() -> None:
    anchors = {page: {*map(anchor, HEADING.findall((ROOT / page).read_text()))} for page in PAGES}
    found: list[str] = []
    for page in PAGES:
        for link, name in ANCHOR.findall((ROOT / page).read_text()):
            target = str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT)) if link else page
            if name not in anchors.get(target, {name}):
                found.append(f"{page}: {link}#{name}")
    none(found, "no such heading")


def test_decisions_in_texts_exist() -> None:
    pages = [text for page, text in TEXTS.items() if page.startswith("docs/decisions/")]
    known = {number for text in pages for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)}
    none(missing(DECISION.findall, known.__contains__), "no such heading in docs/decisions")


def prose(source: Source) -> list[tuple[int, str]]:
    return [*source.docstrings, *source.comments]


def test_bare_file_names_in_texts_exist() -> None:
    """Comments, docstrings and pages may name a file without its folder, if there is one of that name."""
    files = {source.name.rpartition("/")[2] for source in EVERYTHING} | NOT_OURS
    lines = [(source.name, *found) for source in EVERYTHING for found in prose(source)]
    pages = [page for page in PAGES if page not in GENERATED]
    lines += [(page, n, line) for page in pages for n, line in enumerate(TEXTS[page].splitlines(), 1)]
    none(
        (
            f"{file}:{line}: {name}"
            for file, line, text in lines
            for name in BARE_FILE.findall(text)
            if name not in files and not MADE.search(name)
        ),
        "no file has this name",
    )


def _words_of_code(source: Source) -> Iterator[str]:
    yield from (node.id for node in source.nodes(ast.Name))
    yield from (node.attr for node in source.nodes(ast.Attribute))
    yield from (node.arg for node in source.nodes(ast.arg))
    yield from (node.name for node in source.nodes(ast.ClassDef))
    yield from (node.name for node in source.nodes(ast.alias))
    docstrings = {*source.docstrings}
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, str) and (node.lineno, node.value) not in docstrings:
            yield from re.findall(r"\w+", node.value)


def test_class_names_in_docstrings_and_comments_exist() -> None:
    """A class in backticks is a name in some code: ours, imported, or of a message."""
    used = {word for source in EVERYTHING for word in _words_of_code(source)} | NOT_OURS
    none(
        (
            f"{source.name}:{line}: {name}"
            for source in EVERYTHING
            for line, text in prose(source)
            for name in CLASS.findall(text)
            if name not in used
        ),
        "no code has this name",
    )
