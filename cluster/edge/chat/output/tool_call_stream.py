"""Parses one tool call while the model writes it, and emits its arguments as they arrive.

    <tool_call> what opens a call | its arguments ......... | what is left </tool_call>
                held back           emitted in pieces         the rest

Text that may turn out to be no call is held back; from the first argument on it is a call.
A call ends where its brackets or its element close, or at a tag outside of its texts.
A tag inside a text ends the call as well, if the text does not close behind it: then it is held back.
"""

import json
from dataclasses import dataclass, replace

from tidemill.cluster.edge.chat.formats import JSON_OPENING, CallForm
from tidemill.cluster.edge.chat.output.parameters import ParameterStream
from tidemill.cluster.edge.chat.output.parts import Call
from tidemill.cluster.edge.chat.output.tool_call_parser import Schemas, call_of
from tidemill.cluster.edge.chat.text import first_of, growing


class ToolCallStream:
    """Reads one call of a format, starting behind the tag that begins it. Inside a `thought`, which that tag
    closes, only the functions of `schemas` are called. So it is where a call is `exact`, as a grammar has it:
    an object is one from its opening on, or none."""

    def __init__(
        self, index: int, form: CallForm, schemas: Schemas, thought: str = "", *, exact: bool = False
    ) -> None:
        self._index = index
        self._form = form
        self._schemas = schemas
        self._exact = exact
        self._knows = bool(thought) or exact
        self._opens_object = exact and form.opening is JSON_OPENING
        self._span = None if form.ends else _Span(form)
        self._tags = tuple(
            filter(None, (thought, form.ends, *(tag for tag in form.begins if tag != form.element)))
        )
        self._object = _Brackets("{", "}", '"')  # of a call between tags
        self._ahead: _Brackets | None = None  # behind a tag in a text of it
        self._unread = ""  # may grow into a tag, or begins with one that may be a part of a text
        self._scanned = 0  # characters of it that `_ahead` has
        self._read = ""
        self._held = ""
        self._arguments: _Json | ParameterStream | None = None
        self.rest: str | None = None  # the text behind the call, once it has ended

    @property
    def held(self) -> str:
        """Return all that was read, as long as it may be no call."""
        return self._held

    def push(self, text: str, *, last: bool) -> list[Call]:
        """Return what `text` adds to the call."""
        if self._span is not None:
            calls = self._take(self._upto_bracket(self._span, text))
            if self._opens_object and self._arguments is None and not self._may_open(self._held):
                sizes = range(1, len(self._held) + 1)
                size = next(size for size in sizes if not self._may_open(self._held[:size]))
                self.rest = self._held[size:] + (self.rest or "")
                self._held = self._held[:size]
            return calls
        self._unread += text
        calls: list[Call] = []
        while self.rest is None:
            at, tag = first_of(self._tags, self._unread)
            cut = at if tag else len(self._unread) - (0 if last else growing(self._unread, self._tags))
            calls += self._inside(cut)
            if self.rest is not None or not tag:
                break
            in_text = self._is_in_text(tag, last=last)
            if in_text is None:
                break
            if in_text:
                calls += self._inside(len(tag))
            else:
                self.rest = self._unread
        return calls

    def end(self) -> list[Call] | None:
        """Return what is left when the call or the answer has ended; None if it was no call. Arguments that
        were cut short are not completed: they are no JSON, so no client executes them."""
        if self._arguments is not None:
            return self._grown(self._arguments.end(closed=self.rest is not None))
        call = None
        if not self._lost and not self._opens_object:
            call = call_of(self._held, self._index, self._form)
        is_word = self._form.body == "xml" and not self._form.element  # unless a function has this name
        if call is None or not self._may_call(call.name) or (is_word and call.name not in self._schemas):
            return None
        return [call]

    @property
    def _lost(self) -> bool:
        return self._span is not None and self._span.lost

    def _may_open(self, held: str) -> bool:
        """Return whether a text may become the opening of a call that is an object."""
        bare = "".join(held.split()).removeprefix("[")
        heads = (
            f'{lead}"name":"{name}","{member}":{{'
            for lead in ("{", '{"type":"function",')
            for name in self._schemas
            for member in ("arguments", "parameters")
        )
        return any(head.startswith(bare) or bare.startswith(head) for head in heads)

    def _may_call(self, name: str | None) -> bool:
        return name in self._schemas or not self._knows

    def _inside(self, size: int) -> list[Call]:
        """Read `size` characters, or those up to where the call closes by itself."""
        text, self._unread = self._unread[:size], self._unread[size:]
        if self._form.parameters is not None:
            calls = self._take(text)
            behind = self._arguments.rest if isinstance(self._arguments, ParameterStream) else None
            self.rest = None if behind is None else behind + self._unread
            return calls
        at = self._object.end(text)
        self._read += text[:at]
        if at is not None:
            self.rest = text[at:] + self._unread
        return self._take(text[:at])

    def _is_in_text(self, tag: str, *, last: bool) -> bool | None:
        """Return whether the tag at the start of the unread text is a part of a text of the call; None: that
        is not known yet."""
        if isinstance(self._arguments, ParameterStream):
            return self._arguments.is_open and (self._exact or self._closes_element(tag, last=last))
        if not self._object.in_text:
            return False
        if self._ahead is None:
            self._ahead, self._scanned = replace(self._object), 0
        at = self._ahead.end(self._unread, self._scanned)
        self._scanned = len(self._unread)
        if at is None and not last:
            return None
        self._ahead = None
        return at is not None and _is_json((self._read + self._unread[:at]).partition("{")[2])

    def _closes_element(self, tag: str, *, last: bool) -> bool | None:
        assert self._form.parameters is not None
        closes = self._unread.find(self._form.parameters.ends[0])
        begins = self._unread.find(self._form.begins[0], len(tag))
        if closes < 0 and begins < 0 and not last:
            return None
        return closes >= 0 and (begins < 0 or closes < begins)

    def _take(self, text: str) -> list[Call]:
        if self._arguments is not None:
            return self._grown(self._arguments.push(text))
        self._held += text
        opening = self._form.opening and self._form.opening.match(self._held)
        name = opening and opening[opening.lastindex or 1]
        if opening is None or name is None or self._lost or not self._may_call(name):
            return []
        if self._form.parameters is None:
            self._arguments = _Json()
        else:
            self._arguments = ParameterStream(
                self._form.parameters, self._schemas.get(name, {}), exact=self._exact
            )
        rest, self._held = self._held[opening.end() :], ""
        return [Call(self._index, name, self._arguments.push(rest))]

    def _upto_bracket(self, span: "_Span", text: str) -> str:
        at = span.push(text)
        if at is None:
            return text
        self.rest = text[at:]
        return text[:at]

    def _grown(self, arguments: str) -> list[Call]:
        return [Call(self._index, None, arguments)] if arguments else []


def _is_json(members: str) -> bool:
    try:
        json.loads("{" + members)
    except (ValueError, RecursionError):
        return False
    return True


class _Span:
    """Finds the end of a call without an end tag: the bracket that closes its first one. It is `lost` where
    the first bracket is another one."""

    def __init__(self, form: CallForm) -> None:
        python = form.body == "python"
        self._lead = form.lead
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


@dataclass(slots=True)
class _Brackets:
    """Counts the brackets outside of strings; `opens[0]` is the first."""

    opens: str
    closes: str
    quotes: str
    depth: int = 0
    quote: str = ""  # of the open string
    escaped: bool = False

    @property
    def in_text(self) -> bool:
        return bool(self.quote)

    def end(self, text: str, start: int = 0) -> int | None:
        """Return the offset behind the bracket that closes the first one, if it stands in `text[start:]`."""
        for position in range(start, len(text)):
            char = text[position]
            if self.quote:
                if not self.escaped and char == self.quote:
                    self.quote = ""
                self.escaped = char == "\\" and not self.escaped
            elif char in self.opens:
                self.depth += 1
            elif not self.depth:
                continue
            elif char in self.quotes:
                self.quote = char
            elif char in self.closes:
                self.depth -= 1
                if self.depth == 0:
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
