"""Chat templates: their source, and the form of messages that each wants. jinja_template.py renders them.

Templates differ in earlier calls: with arguments as an object or as its text, and with words, reasoning or
both beside them. Some refuse roles, or their order. The form, and what is refused, is found by trying.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

from tidemill.cluster.edge.chat.text import PLAIN, Message, Rendering, check_chars
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.files import read_regular
from tidemill.workers.messages import BREAKPOINTS_MAX, RequestError

Turns = Sequence[Mapping[str, Any]]
Render = Callable[[Turns, Rendering], str]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

TEMPLATE_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The form of messages.

    text_arguments  calls have the text of their object
    one_text        the template takes either words or reasoning beside calls, so both are one text
    replaced        what becomes a part of a message of the user: keys of REFUSED
    full_tools      each tool has a description and parameters, empty ones if need be
    ids             the form of the ids of calls: that of this family's templates; empty: any
    """

    text_arguments: bool = False
    one_text: bool = False
    replaced: frozenset[str] = frozenset()
    full_tools: bool = False
    ids: Literal["", "mistral", "kimi_k2"] = ""

    def tools(self, how: Rendering) -> Rendering:
        """Return the rendering with tools as the template wants them."""
        if not self.full_tools:
            return how
        return replace(how, tools=[{**tool, "function": _EMPTY | tool["function"]} for tool in how.tools])

    def turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as the template wants them. What replaces one depends on nothing behind it, so
        later turns of a conversation begin with the same text."""
        taken: list[Message] = []
        for message in messages:
            new = self._marked(message, taken) if self.replaced else message
            before = taken[-1] if taken else None
            if before is not None and f"second {new.role}" in self.replaced and _may_join(before, new):
                taken[-1] = Message(
                    new.role, f"{before.content}\n\n{new.content}", {**before.more, **new.more}
                )
            else:
                taken.append(new)
        return [self._turn(message) for message in (self._renamed(taken) if self.ids else taken)]

    def _renamed(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with other ids of calls and of their results. An id depends on nothing behind
        its call."""
        renamed: list[Message] = []
        ids: dict[str, str] = {}
        count = 0
        for message in messages:
            more = dict(message.more)
            if calls := cast("list[dict[str, Any]]", more.get("tool_calls") or []):
                made = [self._id_of(call, count + at) for at, call in enumerate(calls)]
                ids |= {call.get("id", ""): new for call, new in zip(calls, made, strict=True)}
                more["tool_calls"] = [{**call, "id": new} for call, new in zip(calls, made, strict=True)]
                count += len(calls)
            if "tool_call_id" in more:
                more["tool_call_id"] = ids.get(more["tool_call_id"], more["tool_call_id"])
            renamed.append(Message(message.role, message.content, more))
        return renamed

    def _id_of(self, call: Mapping[str, Any], number: int) -> str:
        """Return the id of a call in a chat: 9 letters and digits for Mistral; for Kimi, whose templates show
        ids in place of names, the function and the number of the call."""
        if self.ids == "kimi_k2":
            return f"functions.{call['function']['name']}:{number}"
        return blake2b(f"{number} {call.get('id')}".encode(), digest_size=5).hexdigest()[:9]

    def _marked(self, message: Message, before: Sequence[Message]) -> Message:
        """Return a part of the user in place of a message that the template refuses."""
        is_refused = _kind(message, before) in self.replaced
        calls = message.more.get("tool_calls")
        if calls and (is_refused or "tool" in self.replaced):
            written = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in calls)
            content = f"{message.content}\n<tool_calls>\n{written}\n</tool_calls>".lstrip("\n")
            message = Message(message.role, content, {**message.more, "tool_calls": None})
        if is_refused:
            return Message("user", f"<{message.role}>\n{message.content}\n</{message.role}>")
        return message

    def _turn(self, message: Message) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, "content": message.content, **message.more}
        calls = cast("list[dict[str, Any]]", turn.get("tool_calls") or [])
        if calls:
            turn["tool_calls"] = [*map(_as_text if self.text_arguments else _as_object, calls)]
        reasoning = turn.get("reasoning_content")
        if calls and self.one_text and reasoning and message.content:
            turn |= {"reasoning_content": f"{reasoning}\n{message.content}", "content": ""}
        return turn


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, also where a model wrote none."""
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _kind(message: Message, before: Sequence[Message]) -> str:
    """Return the key of REFUSED for a message behind others."""
    begun = any(earlier.role != "system" for earlier in before)
    match message.role:
        case "system" if before:
            return "system inside" if begun else "second system"
        case "assistant" if not begun:
            return "first assistant"
        case "tool" if not before or not (before[-1].role == "tool" or before[-1].more.get("tool_calls")):
            return "tool alone"
        case role:
            return role


def _may_join(before: Message, message: Message) -> bool:
    return before.role == message.role and not before.more.get("tool_calls")


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


PLAINLY = Shape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A chat template.

    source     its text
    tried      what it writes for some chats
    render     from a chat to its text and to where later chats are likely to leave that, in characters;
               raises only RequestError
    is_inline  short chats take about a millisecond, whatever they hold
    """

    source: str
    tried: str
    render: Callable[[Sequence[Message], Rendering], tuple[str, list[int]]]
    is_inline: bool = True


def inline_template(source: str, render: Render) -> Template:
    """Return a template that is rendered in this process."""
    render = careful(render)
    shape = replace(shape_of(render), full_tools=wants_full_tools(render))
    shapes = (shape, *lenient(render, shape))
    return Template(source=source, tried=tried(render, shape), render=partial(rendered_chat, render, shapes))


def rendered_chat(
    render: Render, shapes: Sequence[Shape], messages: Sequence[Message], how: Rendering
) -> tuple[str, list[int]]:
    """Return what `Template.render` does, by the first shape that is not refused. `render` raises only
    RequestError."""
    shape, *others = shapes
    how = shape.tools(how)
    try:
        text = render(shape.turns(messages), how)
    except RequestError:
        if not others:
            raise
        return rendered_chat(render, others, messages, how)
    if how.chars_max is not None:
        check_chars(len(text), how.chars_max, "tools" if how.tools else "messages")
    return text, shared_ends(render, shape, messages, how, text)


def careful(render: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return the renderer with RequestError for whatever the template raises: it is a program that came with
    the model."""

    def rendered(*args: _Args.args, **named: _Args.kwargs) -> _Result:
        try:
            return render(*args, **named)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    return rendered


_FUNCTION = {"name": "tried_call", "arguments": {"tried_key": "tried_value"}}
_ID = "call_tried"
_CALLS = {"tool_calls": [{"id": _ID, "type": "function", "function": _FUNCTION}]}
_TRIED = (
    Message("user", "a"),
    Message("assistant", "", _CALLS),
    Message("tool", "b", {"name": "tried_call", "tool_call_id": _ID}),
)
_SYSTEM = Message("system", "e")
_BOTH = (_TRIED[0], Message("assistant", "c", {**_CALLS, "reasoning_content": "d"}), _TRIED[2])


_USER, _ANSWERED = _TRIED[0], Message("assistant", "c")
REFUSED: Mapping[str, Sequence[Message]] = {
    "system": (_SYSTEM, _USER),
    "second system": (_SYSTEM, _SYSTEM, _USER),
    "system inside": (_USER, _ANSWERED, _SYSTEM, _USER),
    "first assistant": (_ANSWERED, _USER),
    "tool": _TRIED,
    "tool alone": (_USER, _ANSWERED, _TRIED[2]),
    "second user": (_USER, _USER),
    "second assistant": (_USER, _ANSWERED, _ANSWERED, _USER),
}
"""Chats that some templates refuse, by what is wrong with them."""


def lenient(render: Render, shape: Shape) -> Sequence[Shape]:
    """Return the forms for chats that the template refuses: what it refuses alone is replaced, and then all
    that any template refuses, so that user and assistant alternate."""
    if not _tried(render, shape, [_USER]):
        return ()
    refused = frozenset(kind for kind, chat in REFUSED.items() if not _tried(render, shape, chat))
    return [replace(shape, replaced=kinds) for kinds in (refused, frozenset(REFUSED)) if kinds]


def shape_of(render: Render) -> Shape:
    """Return the form that the template of `render` wants. `render` raises only RequestError."""
    shapes = (PLAINLY, Shape(text_arguments=True), Shape(ids="mistral"), Shape(ids="kimi_k2"))
    right = next((shape for shape in shapes if _shows_call(_tried(render, shape, _TRIED))), None)
    if right is None:
        return PLAINLY
    numbered = f"functions.{_FUNCTION['name']}:0" in _tried(render, right, _TRIED)
    ids = "kimi_k2" if numbered else right.ids
    return replace(right, ids=ids, one_text=not _tried(render, right, _BOTH))


_EMPTY: dict[str, object] = {"description": "", "parameters": {"type": "object", "properties": {}}}
_NAMED = Rendering(tools=[{"type": "function", "function": {"name": "tried_call"}}])


def wants_full_tools(render: Render) -> bool:
    """Return whether the template refuses a tool with a name alone, and not one with empty fields."""
    full = Shape(full_tools=True)
    return not _tried(render, PLAINLY, [_USER], _NAMED) and bool(_tried(render, full, [_USER], _NAMED))


def tried(render: Render, shape: Shape) -> str:
    """Return what a template writes for some chats; empty where it refuses them. `render` raises only
    RequestError."""
    chats = [(_SYSTEM, *_TRIED), (_SYSTEM, *_BOTH), _TRIED[:1]]
    return "".join(_tried(render, shape, chat) for chat in chats)


def _tried(render: Render, shape: Shape, messages: Sequence[Message], how: Rendering = PLAIN) -> str:
    try:
        return render(shape.turns(messages), shape.tools(how))
    except RequestError:
        return ""


def _shows_call(prompt: str) -> bool:
    """Return whether a call shows its name, and then its arguments as JSON: not as a Python object, nor as
    the text of a text."""
    mangled = "'tried_key'" in prompt or '\\"tried_key' in prompt
    before, value, _ = prompt.partition("tried_value")
    return "tried_call" in before and bool(value) and not mangled


_OTHER = "\ue000"
_ANSWER, _QUESTION = Message("assistant", _OTHER), Message("user", _OTHER)
"""Messages that begin as no other message does: with a character for private use."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _OTHER, "description": _OTHER, "parameters": {"type": "object", "properties": {}}},
}


def shared_ends(
    render: Render, shape: Shape, messages: Sequence[Message], how: Rendering, text: str
) -> list[int]:
    """Return where later chats are likely to leave `text`, the rendered chat, in characters: at most
    BREAKPOINTS_MAX, those that the client marked first.

    Other conversations share its tools and system messages. Its own next requests share all messages, or
    those before the first one that the template renders differently once a question follows the answer.
    `render` raises only RequestError.
    """
    first = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    continues, how = how.continues, replace(how, answers=False, continues=False)
    opening = [*messages[:first], _QUESTION]
    later = [
        ([*messages[:index], _ending(messages[index], chars)], how) for index, chars in how.message_marks
    ]
    later += [(opening, replace(how, tools=[*how.tools[:count], _TOOL])) for count in how.tool_marks]
    later.append((opening, how))
    if not continues:
        later += [([*messages, _ANSWER], how), ([*messages, _ANSWER, _QUESTION], how)]
    ends: dict[int, None] = {}
    for chat, changed in later:
        if len(ends) == BREAKPOINTS_MAX:
            break
        try:
            other = render(shape.turns(chat), changed)
        except RequestError:  # some templates refuse chats without a question, or two answers in a row
            continue
        ends[_num_equal(text, other)] = None
    return list(ends)


def _ending(message: Message, chars: int) -> Message:
    """Return a message that leaves another one behind its first `chars` characters."""
    return Message(message.role, message.content[:chars] + _OTHER, message.more)


def _num_equal(left: str, right: str) -> int:
    """Return the length of the common prefix."""
    sizes = range(1, min(len(left), len(right)) + 1)
    return bisect_left(sizes, 1, key=lambda size: int(not right.startswith(left[:size])))


def template_of(given: str) -> str:
    """Return the text of an operator's template: of a file, or itself. Raises TidemillError."""
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    try:
        return read_regular(Path(given), TEMPLATE_BYTES_MAX).decode()
    except (OSError, ValueError) as error:
        raise TidemillError(
            f"--chat-template {given} cannot be read, give a file with a Jinja template: {error}"
        ) from error
