"""Hints of clients: fields that change what is kept, where requests resume and who goes first, and no answer.

The names are those of Anthropic (cache_control), OpenAI (prompt_cache_key, prompt_cache_retention), Dynamo
(nvext) and SGLang (extra_key). docs/api.md has a row for each; params.py has those of offline calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, cast
from urllib.parse import quote

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from tidemill.cluster.edge.chat.request.params import RETAIN_S, Fields, Name, Params, session_of
from tidemill.workers.messages import BREAKPOINTS_MAX, RETAIN_S_MAX, RequestError

TTL_S = {"5m": RETAIN_S, "1h": RETAIN_S_MAX}
RETENTION_S = {"in_memory": RETAIN_S, "in-memory": RETAIN_S, "24h": RETAIN_S_MAX}

PRIORITY_MAX = 100
"""The range in which a client may move a request before or behind others."""

IGNORED_CHARS_MAX = 64
IGNORED_NAMES_MAX = 32
"""The bounds of the header that names ignored fields."""

CONTROL_FORM = 'cache_control: give {"type": "ephemeral"}, perhaps with a "ttl" of "5m" or "1h"'

SALT_FORM = r"^[A-Za-z0-9_-]{1,128}$"


class CacheControl(Fields, extra="ignore"):
    """A mark at the end of a block, as in Anthropic's API: the prompt is retained for `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Mark(NamedTuple):
    """The end of a marked block, in characters of its message."""

    chars: int
    control: CacheControl


class AgentHints(Fields):
    """Dynamo's hints of agents. Of `priority`, higher values go first there."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)

    priority: int | None = None


class NvidiaExtensions(Fields):
    """Dynamo's extensions of OpenAI's API."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)

    agent_hints: AgentHints = AgentHints()
    cache_control: CacheControl | None = None


class HintedParams(Params):
    """The hints at the top level of a body."""

    priority: Annotated[
        int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX, description="lower values go first")
    ] = 0
    cache_salt: Annotated[str, Field(pattern=SALT_FORM)] | None = None
    extra_key: Annotated[str, Field(pattern=SALT_FORM, description="another name of cache_salt")] | None = (
        None
    )
    cache_control: CacheControl | None = None
    prompt_cache_key: Annotated[Name | None, Field(description="as session_id")] = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    nvext: NvidiaExtensions = NvidiaExtensions()

    def marks(self) -> list[Mark]:
        """Return the ends of the blocks that are marked inside the prompt."""
        return []

    def check_marks(self) -> None:
        """Check the number of marks. Raises RequestError."""
        check_marks(self.marks())

    def salt(self) -> str | None:
        """Return the client's salt. Raises RequestError."""
        if None not in (self.cache_salt, self.extra_key):
            raise RequestError("extra_key is another name of cache_salt: give one", param="extra_key")
        return self.cache_salt or self.extra_key

    def sort_class(self) -> int:
        """Return the priority class, of which lower ones go first."""
        urgency = self.nvext.agent_hints.priority
        if urgency is None or "priority" in self.model_fields_set:
            return self.priority
        return max(-PRIORITY_MAX, min(-urgency, PRIORITY_MAX))

    def retain_s(self) -> float:
        controls = [self.cache_control, self.nvext.cache_control, *(mark.control for mark in self.marks())]
        times_s = [TTL_S[control.ttl] for control in controls if control is not None]
        if self.prompt_cache_retention is not None:
            times_s.append(RETENTION_S[self.prompt_cache_retention])
        if self.retain is not None:
            times_s.append(self.retain)
        if not times_s and self.prompt_cache_key is not None:
            return RETAIN_S
        return max(times_s, default=super().retain_s())

    def session(self, tenant: str) -> str:
        if self.session_id is None and self.prompt_cache_key is not None:
            return session_of(tenant, "key", self.prompt_cache_key)
        return super().session(tenant)

    def ignored(self, harmless: Mapping[str, object]) -> tuple[str, ...]:
        """Return the fields that have no effect. `harmless` asks for what is so anyway."""
        return tuple(islice(self._ignored(harmless), IGNORED_NAMES_MAX))

    def _ignored(self, harmless: Mapping[str, object]) -> Iterator[str]:
        yield from (name for name in self.model_extra or {} if name not in harmless)
        yield from (f"nvext.{name}" for name in self.nvext.model_extra or {})
        hints = self.nvext.agent_hints
        yield from (f"nvext.agent_hints.{name}" for name in hints.model_extra or {})
        if hints.priority is not None and "priority" in self.model_fields_set:
            yield "nvext.agent_hints.priority"
        if self.session_id is not None and self.prompt_cache_key is not None:
            yield "prompt_cache_key"


def check_marks(marks: Sequence[Mark]) -> None:
    """Check the number of marks. Raises RequestError."""
    if len(marks) > BREAKPOINTS_MAX:
        raise RequestError(
            f"{len(marks)} blocks with cache_control: mark at most {BREAKPOINTS_MAX}", param="cache_control"
        )


def marks_of(content: object) -> tuple[Mark, ...]:
    """Return the marks in a list of text parts. Raises ValueError."""
    marks: list[Mark] = []
    chars = 0
    for part in cast("list[object]", content) if isinstance(content, list) else ():
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        text, control = fields.get("text", fields.get("refusal")), fields.get("cache_control")
        chars += len(text) if isinstance(text, str) else 0
        if control is not None:
            try:
                marks.append(Mark(chars, _CONTROL.validate_python(control)))
            except ValidationError:
                raise ValueError(CONTROL_FORM) from None
    return tuple(marks)


def marked_parts(text: str, marks: Sequence[Mark]) -> list[dict[str, object]]:
    """Return the text in parts that end at the marks."""
    starts = [0, *(mark.chars for mark in marks)]
    parts: list[dict[str, object]] = [
        {"type": "text", "text": text[start : mark.chars], "cache_control": mark.control}
        for start, mark in zip(starts, marks, strict=False)
    ]
    return [*parts, {"type": "text", "text": text[starts[-1] :]}]


_CONTROL = TypeAdapter(CacheControl)


def printable(name: str) -> str:
    """Return the name of a field as a header can hold it."""
    return quote(name[:IGNORED_CHARS_MAX], safe="", errors="replace")


def in_header(names: Sequence[str]) -> str:
    """Return the first of the names of fields, which clients choose, as one header."""
    return ", ".join(map(printable, names[:IGNORED_NAMES_MAX]))
