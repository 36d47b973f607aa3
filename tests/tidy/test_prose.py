"""Prose and names are plain technical English: CONTRIBUTING.md has the rules, docs/glossary.md the terms."""

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import EVERYTHING, GENERATED, LAYERS, PAGES, ROOT, Source, none

SOURCES = [source for source in EVERYTHING if source.name != "tests/tidy/test_prose.py"]

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


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the names that a file defines or assigns."""
    for node in source.nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        yield node.lineno, node.name
    for node in source.nodes(ast.arg):
        yield node.lineno, node.arg
    for node in source.nodes(ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
    for node in source.nodes(ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def loop_variables(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(ast.For, ast.AsyncFor, ast.comprehension):
        for name in ast.walk(node.target):
            if isinstance(name, ast.Name):
                yield name.lineno, name.id
    for node in source.nodes(ast.Lambda):
        for arg in node.args.args:
            yield arg.lineno, arg.arg


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """Yield docstrings and comments, and the texts of the product's messages."""
    yield from source.docstrings
    yield from source.comments
    if source.name.startswith(LAYERS):
        for node in source.nodes(ast.Constant):
            if isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    none(
        (
            f"{source.name}:{line}: {text.strip()[:60]}"
            for source in SOURCES
            for line, text in source.docstrings
            if NOT_FIRST.match(text.strip())
        ),
        "a docstring starts with a verb, or with a noun phrase with an article",
    )


def test_prose_uses_plain_words() -> None:
    none(
        (
            f"{source.name}:{line}: {word}"
            for source in SOURCES
            for line, text in prose(source)
            for word in NOT_USED.findall(text)
        ),
        "write it in plain words",
    )


def test_names_say_what_they_hold() -> None:
    none(
        (
            f"{source.name}:{line}: {name}"
            for source in SOURCES
            for line, name in names(source)
            if NOT_NAMES & set(name.lower().split("_")) and name not in JSON_FIELDS
        ),
        "a name says what it holds",
    )
    none(
        (
            f"{source.name}:{line}"
            for source in SOURCES
            for line, name in loop_variables(source)
            if name == "one"
        ),
        "a loop variable called `one`",
    )


def test_markdown_wraps_at_100_columns_and_starts_a_line_per_sentence() -> None:
    """Tables, links and code are exempt."""
    found: list[str] = []
    for page in PAGES:
        in_code = False
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            if page in GENERATED or in_code or line.startswith(("|", "    ", "#", "```")):
                continue
            text = re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", line)
            if len(line) > COLUMNS and len(text) >= len(line) - len(line.split()[-1]):
                found.append(f"{page}:{number} has {len(line)} columns")
            if re.search(r"[a-z)]\. [A-Z][a-z]", text):
                found.append(f"{page}:{number} has two sentences")
    none(found, f"a sentence starts a new line and wraps at {COLUMNS} columns")


def test_architecture_fits_on_four_screens() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= COLUMNS
