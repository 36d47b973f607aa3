"""Parses the parameters of one call that stand between tags, or behind their names, as they arrive.

<parameter=at> the harbor </parameter> <parameter=far> true </parameter> </function>
at:<|"|>the harbor<|"|>,far:true}
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tidemill.cluster.edge.chat.formats import QUOTE, Parameters
from tidemill.cluster.edge.chat.output.tool_call_parser import (
    TEXT,
    is_text,
    json_of_gemma,
    parameters_of,
    types_of,
    value_of,
)
from tidemill.cluster.edge.chat.text import growing

TEXT_MARKS = ("true", QUOTE)
BARE_MARKS = re.compile(rf"{re.escape(QUOTE)}|[{{}}\[\],]")

CONTAINER = re.compile(r"\s*[\[{\"]")
STRING = r'"(?:[^"\\]|\\.?)*+(?:"|\Z)'
"""Matches a string of JSON, perhaps cut short: no end tag in it is one."""


class ParameterStream:
    """Parameters between tags, emitted as the JSON object that they form. A parameter that is no text is
    emitted when it is complete. Where they are `exact`, as a grammar has them, no end tag is missing."""

    def __init__(self, marks: Parameters, schema: Mapping[str, Any], *, exact: bool = False) -> None:
        self._marks = marks
        self._exact = exact
        self._ends = (marks.end,) if exact else marks.ends
        self._schema = schema
        self._parameters = parameters_of(schema)
        self._held: str = ""
        self._name: str | None = None  # of the open parameter
        self._is_text = False  # it is written as a text
        self._bare: _Bare | None = None  # it has no end tag
        self._before = "{"  # the text before the next one
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Return whether a text is."""
        return self._name is not None and (self._bare is None or self._bare.in_text)

    @property
    def rest(self) -> str | None:
        """Return the text behind the element, once it has ended."""
        return self._held if self._ended else None

    def push(self, text: str) -> str:
        self._held += text
        written: list[str] = []
        while not self._ended and (self._between(written) if self._name is None else self._inside(written)):
            pass
        return "".join(written)

    def end(self, *, closed: bool) -> str:
        if self._ended:
            return ""
        held = self._held.removesuffix("\n") if closed and self._marks.on_lines else self._held
        value = "" if self._name is None else self._value(held, whole=closed)
        return value if not closed else f"{value}}}" if self._before == ", " else "{}"

    def _between(self, written: list[str]) -> bool:
        """Read what follows a parameter; return whether the held text may contain more. Other text ends the
        call."""
        if parameter := self._marks.opening.match(self._held):
            self._held = self._held[parameter.end() :]
            self._open(*parameter.groups(), written=written)
            return True
        begun, bare = self._held, self._held.lstrip()
        if bare.startswith(self._marks.ends[0]):  # once more
            self._held = bare.removeprefix(self._marks.ends[0])
            return True
        if self._may_go_on(bare):
            if not (self._marks.closes and bare.startswith(self._marks.closes)):
                return False
            begun = bare.removeprefix(self._marks.closes)
        written.append("}" if self._before == ", " else "{}")
        self._held, self._ended = begun, True
        return False

    def _open(self, name: str, mark: str | None = None, *, written: list[str]) -> None:
        """Open a parameter, with what marks its value as a text or as JSON."""
        self._name = name
        types = types_of(self._wanted, self._schema)
        self._bare = _Bare() if self._marks.begun is not None and mark is None else None
        if (mark or self._bare) and types != TEXT and (types is None or "string" in types):
            self._is_text = mark in TEXT_MARKS
        else:
            self._is_text = is_text(self._wanted, self._schema)
        written.append(f"{self._before}{json.dumps(name, ensure_ascii=False)}: ")
        written.append('"' if self._is_text else "")
        self._before = ", "

    def _may_go_on(self, bare: str) -> bool:
        marks = (self._marks.begins, self._marks.closes, self._marks.ends[0])
        return any(mark.startswith(bare[: len(mark)]) for mark in marks if mark) or (
            self._marks.begun is not None and self._marks.begun.fullmatch(bare) is not None
        )

    def _inside(self, written: list[str]) -> bool:
        at, end = self._end_of_value()
        if at is not None:
            written.append(self._value(self._held[:at], whole=True))
            behind = end if end.endswith(self._marks.ends[0]) else ""
            self._name, self._held = None, self._held[at + len(behind) :]
            return True
        if self._is_text and self._bare is None:
            cut = len(self._held) - growing(self._held, self._ends)
            written.append(_escaped(self._held[:cut]))
            self._held = self._held[cut:]
        return False

    def _end_of_value(self) -> tuple[int | None, str]:
        """Return where the value ends, and the text that ends it."""
        if self._bare is not None:
            return self._bare.end(self._held), ""
        found = ((at, end) for end in self._ends if (at := self._held.find(end)) >= 0)
        at, end = min(found, default=(None, ""))
        if at is None or self._is_text or not self._exact or not CONTAINER.match(self._held):
            return at, end
        ends = "|".join(map(re.escape, self._ends))
        tokens = re.finditer(rf"{STRING}|({ends})", self._held)
        return next(((token.start(), token[0]) for token in tokens if token[1]), (None, ""))

    @property
    def _wanted(self) -> Mapping[str, Any]:
        assert self._name is not None
        return self._parameters.get(self._name, {})

    def _value(self, text: str, *, whole: bool) -> str:
        """Return the rest of the open parameter; if it was cut short, the text so far."""
        if not whole:
            return _escaped(text) if self._is_text or not text else f'"{_escaped(text)}'
        text = text if self._bare is None else text.strip()
        if self._is_text:
            return f'{_escaped(text)}"'
        text = text if self._bare is None else json_of_gemma(text)
        return json.dumps(value_of(text, types_of(self._wanted, self._schema)), ensure_ascii=False)


class _Bare:
    """Finds the end of a value without quotation marks, as Gemma writes it: a comma or bracket behind it."""

    def __init__(self) -> None:
        self._depth = self._scanned = 0
        self.in_text = False

    def end(self, text: str) -> int | None:
        """Return where the value ends; `text` begins with it and has all of it that has arrived."""
        upto = len(text) - growing(text, (QUOTE,))
        for found in BARE_MARKS.finditer(text, self._scanned, upto):
            if found[0] == QUOTE:
                self.in_text = not self.in_text
            elif not self.in_text and found[0] in "{[":
                self._depth += 1
            elif not self.in_text and not self._depth:
                return found.start()
            elif not self.in_text and found[0] in "]}":
                self._depth -= 1
        self._scanned = upto
        return None


def _escaped(text: str) -> str:
    """Return the text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
