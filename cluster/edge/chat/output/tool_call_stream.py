"""Parses one tool call while the model writes it, and emits its arguments as they arrive.

    <tool_call> what opens a call | its arguments ......... | what is left </tool_call> rest
                held back           emitted in pieces         dropped

Text that may turn out to be no call is held back; from the first argument on it is a call.
A call without an end tag ends where its brackets close.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tidemill.cluster.edge.chat.formats import CallForm
from tidemill.cluster.edge.chat.output.parts import Call
from tidemill.cluster.edge.chat.output.tool_call_parser import (
    Schemas,
    call_of,
    is_text,
    parameters_of,
    value_of,
)
from tidemill.cluster.edge.chat.text import growing

PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(?:\n|(?=[^\n]))")
PARAMETER_ENDS = ("</parameter>", "\n</parameter>")
FUNCTION_END = re.compile(r"\s*</function>")

JSON_LEAD = re.compile(r"\s*\[?\s*")
PYTHON_LEAD = re.compile(r"\s*\[?\s*(?:[A-Za-z_][\w.-]*\s*)?")
"""The text that may precede the first bracket of a call without tags."""


class ToolCallStream:
    """Reads one call of a format, starting behind the tag that begins it."""

    def __init__(self, index: int, form: CallForm, schemas: Schemas) -> None:
        self._index = index
        self._form = form
        self._schemas = schemas
        self._span = None if form.ends else _Span(form)
        self._unread = ""  # may grow into its end tag
        self._held = ""
        self._arguments: _Json | _Xml | None = None
        self.rest: str | None = None  # the text behind the call, once it has ended

    @property
    def held(self) -> str:
        """Return all that was read, as long as it may be no call."""
        return self._held

    def push(self, text: str, *, last: bool) -> list[Call]:
        """Return what `text` adds to the call."""
        text = self._upto_tag(text, last=last) if self._span is None else self._upto_bracket(self._span, text)
        if self._arguments is not None:
            return self._grown(self._arguments.push(text))
        self._held += text
        opening = self._form.opening and self._form.opening.match(self._held)
        if opening is None or self._lost:
            return []
        if self._form.body == "xml":
            self._arguments = _Xml(self._schemas.get(opening[1], {}))
        else:
            self._arguments = _Json()
        rest, self._held = self._held[opening.end() :], ""
        return [Call(self._index, opening[1], self._arguments.push(rest))]

    def end(self) -> list[Call] | None:
        """Return what is left when the call or the answer has ended; None if it was no call. Arguments that
        were cut short are not completed: they are no JSON, so no client executes them."""
        if self._arguments is not None:
            return self._grown(self._arguments.end(closed=self.rest is not None))
        call = None if self._lost else call_of(self._held, self._index, self._form.body)
        return None if call is None else [call]

    @property
    def _lost(self) -> bool:
        return self._span is not None and self._span.lost

    def _upto_tag(self, text: str, *, last: bool) -> str:
        ends = self._form.ends
        self._unread += text
        at = self._unread.find(ends)
        cut = at if at >= 0 else len(self._unread) - (0 if last else growing(self._unread, (ends,)))
        text, self._unread = self._unread[:cut], self._unread[cut:]
        if at >= 0:
            self.rest = self._unread[len(ends) :]
        return text

    def _upto_bracket(self, span: "_Span", text: str) -> str:
        at = span.push(text)
        if at is None:
            return text
        self.rest = text[at:]
        return text[:at]

    def _grown(self, arguments: str) -> list[Call]:
        return [Call(self._index, None, arguments)] if arguments else []


class _Span:
    """Finds the end of a call without an end tag: the bracket that closes its first one. It is `lost` where
    the first bracket is another one."""

    def __init__(self, form: CallForm) -> None:
        python = form.body == "python"
        self._lead = PYTHON_LEAD if python else JSON_LEAD
        self._brackets = _Brackets("([{", ")]}", "\"'") if python else _Brackets("{", "}", '"')
        self._before: str | None = ""  # None: the first bracket has arrived
        self.lost = False

    def push(self, text: str) -> int | None:
        """Return where in `text` the call ends."""
        start = 0
        if self._before is not None:
            whole = self._before + text
            lead = self._lead.match(whole)
            assert lead is not None
            if lead.end() == len(whole):
                self._before = whole
                return None
            start = lead.end() - len(self._before)
            self._before = None
            self.lost = text[start] != self._brackets.opens[0]
            if self.lost:
                return start
        return self._brackets.end(text, start)


class _Brackets:
    """Counts the brackets outside of strings; `opens[0]` is the first."""

    def __init__(self, opens: str, closes: str, quotes: str) -> None:
        self.opens = opens
        self._closes = closes
        self._quotes = quotes
        self._depth = 0
        self._inside = ""  # the quote of the open string
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int | None:
        """Return the offset behind the bracket that closes the first one, if it stands in `text[start:]`."""
        for position in range(start, len(text)):
            char = text[position]
            if self._inside:
                if not self._escaped and char == self._inside:
                    self._inside = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in self._quotes:
                self._inside = char
            elif char in self.opens:
                self._depth += 1
            elif char in self._closes:
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


class _Json:
    """The object as the model writes it, up to the brace that closes it."""

    def __init__(self) -> None:
        self._brackets = _Brackets("{", "}", '"')
        self._ended = False

    def push(self, text: str) -> str:
        if self._ended:
            return ""
        at = self._brackets.end(text)
        self._ended = at is not None
        return text[:at]

    def end(self, *, closed: bool) -> str:
        del closed
        return ""


class _Xml:
    """XML parameters, emitted as the JSON object that they form. A parameter that is no text is emitted when
    it is complete."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._parameters = parameters_of(schema)
        self._held = ""
        self._name: str | None = None  # of the open parameter
        self._before = "{"  # the text before the next one
        self._ended = False

    def push(self, text: str) -> str:
        self._held += text
        written: list[str] = []
        while not self._ended and (self._between(written) if self._name is None else self._inside(written)):
            pass
        return "".join(written)

    def end(self, *, closed: bool) -> str:
        value = "" if self._name is None else self._value(self._held, whole=closed)
        if not closed or self._ended:
            return value
        return f"{value}}}" if self._before == ", " else "{}"

    def _between(self, written: list[str]) -> bool:
        """Read what follows a parameter; return whether the held text may contain more. Other text is
        dropped, with all behind it."""
        if parameter := PARAMETER.match(self._held):
            self._name, self._held = parameter[1], self._held[parameter.end() :]
            written.append(f"{self._before}{json.dumps(self._name, ensure_ascii=False)}: ")
            written.append('"' if self._is_text else "")
            self._before = ", "
            return True
        if FUNCTION_END.match(self._held):
            written.append("}")
            self._ended = True
        return False

    def _inside(self, written: list[str]) -> bool:
        value, end, rest = self._held.partition(PARAMETER_ENDS[0])
        if end:
            written.append(self._value(value, whole=True))
            self._name, self._held = None, rest
            return True
        if self._is_text:
            cut = len(value) - growing(value, PARAMETER_ENDS)
            written.append(_escaped(value[:cut]))
            self._held = value[cut:]
        return False

    @property
    def _is_text(self) -> bool:
        return is_text(self._wanted)

    @property
    def _wanted(self) -> Mapping[str, Any]:
        assert self._name is not None
        return self._parameters.get(self._name, {})

    def _value(self, text: str, *, whole: bool) -> str:
        """Return the rest of the open parameter; if it was cut short, the text so far."""
        if not whole:
            return _escaped(text) if self._is_text else ""
        text = text.removesuffix("\n")
        if self._is_text:
            return f'{_escaped(text)}"'
        return json.dumps(value_of(text, self._wanted), ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return the text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
