"""The tree that the rules look at: each file is read, parsed and walked once for all of them."""

import ast
import gc
import io
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "kvstore", "connect", "workers", "cluster")
GENERATED = {"docs/cli.md", "docs/compatibility.md", "docs/configuration.md", "docs/metrics.md"}

Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Source:
    """A Python file. Its name is its path from the root."""

    name: str
    text: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @cached_property
    def tree(self) -> ast.Module:
        gc.disable()  # it would look through a million nodes again and again
        tree = ast.parse(self.text)
        gc.freeze()
        gc.enable()
        return tree

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[Any]]:
        kinds: dict[type[ast.AST], list[Any]] = {}
        for node in ast.walk(self.tree):
            kinds.setdefault(type(node), []).append(node)
        return kinds

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """Yield all nodes of these types."""
        for kind in kinds:
            yield from self._by_kind.get(kind, [])

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        """The strings that stand alone, with their lines: docstrings, and the strings below attributes."""
        alone = [node.value for node in self.nodes(ast.Expr) if isinstance(node.value, ast.Constant)]
        return [(text.lineno, text.value) for text in alone if isinstance(text.value, str)]

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        if "#" not in self.text:
            return []
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _sources() -> list[Source]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate", "*.py"],  # noqa: S607 - any git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [Source(name, path.read_text()) for name in sorted(names) if (path := ROOT / name).is_file()]


EVERYTHING = _sources()
PRODUCT = [source for source in EVERYTHING if source.name.startswith(tuple(f"{x}/" for x in LAYERS))]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
"""Pages of Markdown, those that the code generates included."""


def none(found: Iterable[object], fix: str) -> None:
    """Fail with everything that a rule found and what to do about it."""
    lines = [str(thing) for thing in found]
    assert not lines, "\n".join([f"{fix}:", *lines])
