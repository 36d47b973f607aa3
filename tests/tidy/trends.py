"""Counts by folder that show a trend and fail nothing: `make trends`.

Lines are those of files; a function counts its lines below decorators, and words of pages have a letter or
a digit, as bars of tables have not.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from tests.tidy.tree import EVERYTHING, LAYERS, PAGES, PRODUCT, ROOT, Source

LARGEST = 5
WORD = re.compile(r"\S*\w\S*")


def groups() -> dict[str, list[Source]]:
    """Return the files of each layer and each of its folders, of tests, and of the other tools."""
    found: dict[str, list[Source]] = {}
    for source in EVERYTHING:
        first, _, rest = source.name.partition("/")
        found.setdefault(first if rest else "the root", []).append(source)
        if first in {*LAYERS, "tests"} and "/" in rest:
            found.setdefault(f"{first}/{rest.partition('/')[0]}", []).append(source)
    return {"product": PRODUCT} | dict(sorted(found.items()))


def functions(sources: Iterable[Source]) -> Iterator[tuple[int, str]]:
    for source in sources:
        for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{source.name}::{node.name}"


def attributes(sources: Iterable[Source]) -> Iterator[tuple[int, str]]:
    for source in sources:
        for node in source.nodes(ast.ClassDef):
            owned = {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
            yield len(owned), f"{source.name}::{node.name}"


def lines(sources: Iterable[Source]) -> list[tuple[int, str]]:
    return [(source.text.count("\n"), source.name) for source in sources]


def report() -> Iterator[str]:
    """Yield the tables, line by line."""
    columns = ("folder", "files", "lines", "median", "longest", "functions", "median", "longest")
    yield "{:24}{:>8}{:>8}{:>8}{:>8}{:>11}{:>8}{:>8}".format(*columns)
    for folder, sources in groups().items():
        files, bodies = [n for n, _ in lines(sources)], [n for n, _ in functions(sources)] or [0]
        cells = (len(files), sum(files), median(files), max(files), len(bodies), median(bodies), max(bodies))
        yield "{:24}{:8}{:8}{:8.0f}{:8}{:11}{:8.0f}{:8}".format(folder, *cells)
    words = {page: len(WORD.findall((ROOT / page).read_text())) for page in PAGES}
    kinds = Counter[str]()
    for page, count in words.items():
        folder = page.rpartition("/")[0]
        kinds[folder or "the root"] += count
    yield f"\n{sum(words.values())} words in {len(words)} pages: " + ", ".join(
        f"{folder} {count}" for folder, count in kinds.most_common()
    )
    largest = {
        "files": lines(PRODUCT),
        "functions": functions(PRODUCT),
        "classes by attributes": attributes(PRODUCT),
    }
    for kind, counted in largest.items():
        yield f"\nThe largest {kind} of the product:"
        yield from (f"{count:6} {name}" for count, name in sorted(counted, reverse=True)[:LARGEST])
    classes = Counter(node.name for source in PRODUCT for node in source.nodes(ast.ClassDef))
    twice = sorted(name for name, count in classes.items() if count > 1 and not name.startswith("_"))
    yield f"\nPublic classes of one name: {', '.join(twice) or 'none'}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in report())
