"""A planted bug, and the search for its place in the code."""

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"""\$\w+|"[^"\n]*"|'[^'\n]*'|\w+|\s+|.""", re.DOTALL)
_RESERVED = {*keyword.kwlist, *dir(builtins), "self", "cls"}


@dataclass(frozen=True)
class Planted:
    """A bug: what `find` matches, exactly once in `where`, becomes `put`, and one of `tests` must fail.

    `where` is `path` or `path::Class.method`, as pytest names a test.
    As in Semgrep, a `$NAME` in `find` matches any one identifier and stands for it in `put`, so that
    renames of variables and attributes break nothing. White space matters only between two words.
    """

    bug: str
    where: str
    find: str
    put: str
    tests: str
    cpu: str = ""  # the feature, as /proc/cpuinfo names it, without which nothing runs the code

    @property
    def path(self) -> str:
        return self.where.partition("::")[0]

    def plant(self, text: str) -> str:
        """Return the file's text with the bug in it.

        Raises ValueError unless `find` matches once in `where`.
        """
        start, end = _span(text, self.where.partition("::")[2])
        found = list(_pattern(self.find).finditer(text, start, end))
        if len(found) != 1:
            msg = f"{self.where}: {self.find!r} of the bug {self.bug!r} matches {len(found)} times, not once"
            raise ValueError(msg)
        names = found[0].groupdict()
        put = re.sub(r"\$(\w+)", lambda name: names[name[1]], self.put)
        return text[: found[0].start()] + put + text[found[0].end() :]

    def literal_names(self) -> set[str]:
        """Return the identifiers that `put` brings by name."""
        tokens = [token for token in _TOKEN.findall(self.put) if token.isidentifier()]
        return set(tokens) - _RESERVED


def read(text: str) -> Iterator[Planted]:
    """Return the bugs of a file. Each is like a part of a diff; without a `+`, code goes:

    # the name of the bug
    @@ where @@ tests @@ cpu
    -find
    +put
    """
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        bug, header, *lines = part.splitlines()
        _, where, *rest = map(str.strip, header.split("@@"))
        find, put = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert all(line[0] in "-+" for line in lines), bug
        yield Planted(bug, where, find, put, *rest)


def _span(text: str, symbol: str) -> tuple[int, int]:
    """Return the half-open range of characters of a class or function; all of the text without one."""
    node: ast.AST = ast.parse(text) if symbol else ast.Module([], [])
    for name in symbol.split(".") if symbol else ():
        inner = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name
        ]
        if not inner:
            msg = f"there is no {symbol}"
            raise ValueError(msg)
        node = inner[0]
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return 0, len(text)
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def _pattern(find: str) -> re.Pattern[str]:
    parts: list[str] = []
    seen: set[str] = set()
    for token in _TOKEN.findall(find):
        if token.isspace():
            parts.append(r"(?:\b\s+\b)?")
        elif token.startswith("$") and len(token) > 1:
            parts.append(f"(?P={token[1:]})" if token in seen else rf"\b(?P<{token[1:]}>[A-Za-z_]\w*)\b")
            seen.add(token)
        else:
            parts.append(re.escape(token))
    return re.compile(r"\s*".join(parts))
