"""One call of a tool while the model writes it: its arguments are told as they come.

    <tool_call> what opens a call | its arguments ......... | what is left </tool_call>
                held back           told piece by piece       dropped

Held back is all that might turn out to be no call. From the first argument on it is one, come what may.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tidemill.workers.api.calls import Call, Schemas, call_of, is_text, parameters_of, value_of
from tidemill.workers.api.text import growing

JSON_OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"arguments"\s*:\s*(?=\{\s*["}])')
XML_OPENING = re.compile(r"\s*<function=([^>\s]+)>(?=\s*<parameter=[^>\s]+>)")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(?:\n|(?=[^\n]))")
PARAMETER_ENDS = ("</parameter>", "\n</parameter>")
FUNCTION_END = re.compile(r"\s*</function>")


class Calling:
    """Reads what stands between the tags. `schemas` are those of a model that writes XML."""

    def __init__(self, index: int, schemas: Schemas | None) -> None:
        self._index = index
        self._schemas = schemas
        self._held = ""
        self._arguments: _Json | _Xml | None = None

    @property
    def held(self) -> str:
        """All that was pushed, as long as it may be no call."""
        return self._held

    def push(self, text: str) -> list[Call]:
        """What `text` adds to the call."""
        if self._arguments is not None:
            return self._grown(self._arguments.push(text))
        self._held += text
        opening = (JSON_OPENING if self._schemas is None else XML_OPENING).match(self._held)
        if opening is None:
            return []
        if self._schemas is None:
            self._arguments = _Json()
        else:
            self._arguments = _Xml(self._schemas.get(opening[1], {}))
        rest, self._held = self._held[opening.end() :], ""
        return [Call(self._index, opening[1], self._arguments.push(rest))]

    def end(self, *, closed: bool) -> list[Call] | None:
        """What is left, now that the tag has `closed` the call or the answer has ended in it; None if it was
        no call. Arguments that were cut short stay as they are: no JSON, so nobody carries them out."""
        if self._arguments is not None:
            return self._grown(self._arguments.end(closed=closed))
        call = call_of(self._held, self._index, self._schemas)
        return None if call is None else [call]

    def _grown(self, arguments: str) -> list[Call]:
        return [Call(self._index, None, arguments)] if arguments else []


class _Json:
    """The object as the model writes it, up to the brace that closes it."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = False  # a text
        self._escaped = False
        self._ended = False

    def push(self, text: str) -> str:
        if self._ended:
            return ""
        for place, char in enumerate(text):
            if self._inside:
                self._inside = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._inside = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    self._ended = True
                    return text[: place + 1]
        return text

    def end(self, *, closed: bool) -> str:
        del closed
        return ""


class _Xml:
    """Parameters, told as the JSON object that they make up. What is no text is told when it is whole."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._parameters = parameters_of(schema)
        self._held = ""
        self._name: str | None = None  # of the parameter that is open
        self._before = "{"  # the next one
        self._ended = False

    def push(self, text: str) -> str:
        self._held += text
        told: list[str] = []
        while not self._ended and (self._between(told) if self._name is None else self._inside(told)):
            pass
        return "".join(told)

    def end(self, *, closed: bool) -> str:
        value = "" if self._name is None else self._value(self._held, whole=closed)
        if not closed or self._ended:
            return value
        return f"{value}}}" if self._before == ", " else "{}"

    def _between(self, told: list[str]) -> bool:
        """Whether there may be more to find in what is held. What is no parameter is dropped, with all after
        it."""
        if parameter := PARAMETER.match(self._held):
            self._name, self._held = parameter[1], self._held[parameter.end() :]
            told.append(f"{self._before}{json.dumps(self._name, ensure_ascii=False)}: ")
            told.append('"' if self._is_text else "")
            self._before = ", "
            return True
        if FUNCTION_END.match(self._held):
            told.append("}")
            self._ended = True
        return False

    def _inside(self, told: list[str]) -> bool:
        value, end, rest = self._held.partition(PARAMETER_ENDS[0])
        if end:
            told.append(self._value(value, whole=True))
            self._name, self._held = None, rest
            return True
        if self._is_text:
            cut = len(value) - growing(value, PARAMETER_ENDS)
            told.append(_escaped(value[:cut]))
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
        """The rest of the open parameter; of one that is cut short, the text that there is."""
        if not whole:
            return _escaped(text) if self._is_text else ""
        text = text.removesuffix("\n")
        if self._is_text:
            return f'{_escaped(text)}"'
        return json.dumps(value_of(text, self._wanted), ensure_ascii=False)


def _escaped(text: str) -> str:
    """Inside of a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
