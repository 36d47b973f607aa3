"""Prose and names are plain technical English: CONTRIBUTING.md has the rules, docs/glossary.md the terms."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.test_tidy import LAYERS, ROOT

FOLDERS = (*LAYERS, "tests", "benchmarks", "tools")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.stem.endswith("_pb2") and path != Path(__file__)
)

NOT_FIRST = re.compile(
    r"\.\.\.|(?:What|Who|Whom|Whose|Whoever|Whatever|How|Of|Until|So|Which|Where|Whether|Those|That|From"
    r"|And|But|Nobody|Nothing|Everything|Everybody|Also|Only|While|Because|With|Without|As|To|For"
    r"|After|Before)\b"
)
"""A docstring starts with a verb, or with a noun phrase with an article, and not with these words."""

NOT_USED = re.compile(
    r"(?<!/)\b(?:whoever|nobody|somebody|everybody|told|tells|says|said|hears?|heard|dies|died|anew|aside|shall"
    r"|at once|lives|so many|so long(?! as)|so much(?! as)|thereof|besides)\b",
    re.IGNORECASE,
)

NOT_NAMES = {
    *("told", "tell", "tells", "telling", "hear", "hears", "heard", "unheard", "says", "said"),
    *("whoever", "nobody", "somebody", "everybody", "anew", "aside"),
}

JSON_FIELDS = {"heard_ago_s"}
"""Names that clients see keep their spelling."""

COLUMNS = 100
GENERATED = {"docs/cli.md", "docs/compatibility.md", "docs/configuration.md", "docs/metrics.md"}
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
    if str(page.relative_to(ROOT)) not in GENERATED
)


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(ROOT)))
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone: docstrings, and the strings below attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text
            case _:
                pass


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that a file defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case _:
                pass


def test_docstrings_start_with_a_verb_or_a_noun(path: Path) -> None:
    found = [
        f"{path}:{node.lineno}: {str(node.value).strip()[:60]}"
        for node in docstrings(parsed(path))
        if NOT_FIRST.match(str(node.value).strip())
    ]
    assert not found


def test_prose_uses_plain_words(path: Path) -> None:
    text = path.read_text()
    found = [
        f"{path}:{node.lineno}: {word}"
        for node in docstrings(parsed(path))
        for word in NOT_USED.findall(str(node.value))
    ]
    found += [
        f"{path}:{token.start[0]}: {word}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        for word in NOT_USED.findall(token.string)
    ]
    if path.relative_to(ROOT).parts[0] in LAYERS:
        found += [
            f"{path}:{node.lineno}: {word}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
            for word in NOT_USED.findall(node.value)
        ]
    assert not found


def test_names_say_what_they_hold(path: Path) -> None:
    tree = parsed(path)
    found = [
        f"{path}:{line}: {name}"
        for line, name in names(tree)
        if NOT_NAMES & set(name.lower().split("_")) and name not in JSON_FIELDS
    ]
    targets = [
        node.target for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
    ]
    targets += [arg for node in ast.walk(tree) if isinstance(node, ast.Lambda) for arg in node.args.args]
    found += [
        f"{path}:{node.lineno}: a loop variable called `one`"
        for target in targets
        for node in ast.walk(target)
        if (isinstance(node, ast.Name) and node.id == "one")
        or (isinstance(node, ast.arg) and node.arg == "one")
    ]
    assert not found


def test_class_names_are_unique_in_the_product() -> None:
    where: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in LAYERS:
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_markdown_wraps_at_100_columns_and_starts_a_line_per_sentence(page: Path) -> None:
    """Tables, links and code are exempt."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if in_code or line.startswith(("|", "    ", "#", "```")):
            continue
        prose = re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", line)
        assert len(line) <= COLUMNS or len(prose) < len(line) - len(line.split()[-1]), f"{page}:{number}"
        assert not re.search(r"[a-z)]\. [A-Z][a-z]", prose), f"{page}:{number}: a sentence starts a new line"


def test_architecture_fits_on_four_screens() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= COLUMNS
