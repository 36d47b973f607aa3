"""The body of POST /v1/messages, and the chat that it asks for.

Blocks of text join without a gap, so a text in blocks and the same text as a string are one prompt, and a
mark of `cache_control` that moves changes none. Thinking becomes reasoning, results of tools become messages.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from tidemill.cluster.edge.chat.request.messages import UNREAD
from tidemill.cluster.edge.chat.request.params import Fields
from tidemill.cluster.edge.chat.request.validation import checked
from tidemill.cluster.edge.requests.bodies import MESSAGES_MAX, AgentChat, ChatBody
from tidemill.workers.messages import RequestError

Block = dict[str, Any]
Turn = dict[str, Any]
Text = str | list[Block]

ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The line that Claude Code begins its system prompt with. It differs from session to session, so no prefix
behind it would be found."""

SESSION = re.compile(r"session_(?:id\W+)?([0-9a-fA-F-]{36})")
"""The session within `metadata.user_id` of Claude Code."""

EFFORTS = {"xhigh": "high", "max": "high"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}

WITHOUT_EFFECT = ("container", "context_management", "inference_geo", "mcp_servers", "service_tier", "speed")
OF_CHATS = frozenset(("n", "logprobs", "top_logprobs", "prompt_logprobs", "response_format", "stop"))
"""Fields of chats that a message has in another form, or not at all."""


class Thinking(BaseModel, strict=True, extra="ignore"):
    """The switch of thinking; a budget of tokens has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(BaseModel, strict=True, extra="ignore"):
    """The effort of the model, and a schema of its answer: {"type": "json_schema", "schema": ...}."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: Block | None = None


class MessagesBody(Fields, extra="allow", allow_inf_nan=False):
    """The body of POST /v1/messages. Fields of chats that it does not name are passed on (seed, min_p,
    cache_salt). More `max_tokens` than fit are as many as fit."""

    model: Annotated[str, Field(max_length=256)] | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: Text = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stop_sequences: list[str] = Field(default=[])
    tools: list[Block] = Field(default=[])
    tool_choice: Block = Field(default={"type": "auto"})
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    metadata: Block = Field(default={})
    chat_template_kwargs: Block = Field(default={})

    def chat(self, kind: type[ChatBody] = AgentChat) -> ChatBody:
        """Return the chat that is asked for. Raises RequestError."""
        passed_on = {name: value for name, value in (self.model_extra or {}).items() if name not in OF_CHATS}
        newest = self._newest()
        turns = [
            *self._system(),
            *(turn for index in range(len(self.messages)) for turn in self._turns(index, newest)),
        ]
        fields: Block = {
            **{name: value for name, value in passed_on.items() if name not in WITHOUT_EFFECT},
            "messages": turns,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": [_tool(tool) for tool in self.tools if _is_own(tool)],
            "continue_final_message": turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1],
            **self._choice(),
            **self._thinking(),
            **self._session(),
        }
        return checked(kind, fields)

    def ignored(self) -> tuple[str, ...]:
        """Return the fields without an effect that the chat does not know of."""
        return tuple(name for name in self.model_extra or {} if name in OF_CHATS or name in WITHOUT_EFFECT)

    def hosted(self) -> list[str]:
        """Return the types of tools that run on other servers."""
        return [str(tool["type"]) for tool in self.tools if not _is_own(tool)]

    def _system(self) -> Iterator[Turn]:
        parts = _parts(self.system, "system")
        if parts:
            parts[0]["text"] = ATTRIBUTION.sub("", parts[0]["text"])
        if any(part["text"] for part in parts):
            yield {"role": "system", "content": parts}

    def _newest(self) -> int:
        """Return the index of the last message with more than results of tools, if it is a user's, else -1.
        Only there a block that cannot be read is refused: an image in the history must not end a session."""
        for index in reversed(range(len(self.messages))):
            turn = self.messages[index]
            if turn.get("role") != "user" or not _has_results_alone(turn.get("content")):
                return index if turn.get("role") == "user" else -1
        return -1

    def _turns(self, index: int, newest: int) -> Iterator[Turn]:
        """Yield the messages of a chat that one message stands for. Raises RequestError."""
        turn, where = self.messages[index], f"messages[{index}]"
        content = turn.get("content")
        match turn.get("role"):
            case "assistant":
                yield _assistant(content or "", where)
            case "user" | "system" as role:
                own: list[Block] = []
                for at, block in enumerate(_blocks(content, where)):
                    if block.get("type") == "tool_result":
                        yield _result(block, f"{where}.content[{at}]")
                    else:
                        own.append(block if index == newest else _readable(block))
                if own or not content:
                    yield {"role": role, "content": _parts(own, f"{where}.content")}
            case _:
                raise RequestError(
                    f"{where}.role: give user, assistant or system", param=f"{where}.role"
                ) from None

    def _choice(self) -> Block:
        match self.tool_choice:
            case {"type": "tool", "name": str(name)}:
                choice: object = {"type": "function", "function": {"name": name}}
            case {"type": str(kind)} if kind in CHOICES:
                choice = CHOICES[kind]
            case _:
                raise RequestError(
                    'tool_choice: give {"type": "auto"}, "any", "none", or "tool" with a "name"',
                    param="tool_choice",
                )
        return {
            "tool_choice": choice,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
        }

    def _thinking(self) -> Block:
        """Return the fields of a chat for thinking, effort and the form of the answer."""
        effort, form = self.output_config.effort, self.output_config.format
        switches: Block = {}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            switches = {"enable_thinking": thinks, "thinking": thinks}
        found: Block = {"chat_template_kwargs": switches | self.chat_template_kwargs}
        if effort is not None:
            found["reasoning_effort"] = EFFORTS.get(effort, effort)
        if form is not None:
            found["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": form.get("schema")},
            }
        return found

    def _session(self) -> Block:
        found = SESSION.search(str(self.metadata.get("user_id", "")))
        return {} if found is None or "session_id" in (self.model_extra or {}) else {"session_id": found[1]}


def _is_own(tool: Block) -> bool:
    """Return whether the client runs a tool; others have a type with a version, like web_search_20250305."""
    return tool.get("type") in (None, "custom")


def _tool(tool: Block) -> Block:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function, "cache_control": tool.get("cache_control")}


def _blocks(content: object, where: str) -> list[Block]:
    match content:
        case str():
            return [{"type": "text", "text": content}]
        case list() if all(isinstance(block, dict) for block in cast("list[object]", content)):
            return cast("list[Block]", content)
        case _:
            raise RequestError(f"{where}: give a text, or a list of blocks", param=where)


def _parts(content: object, where: str) -> list[Block]:
    """Return the parts of a chat's message with the text of blocks. Raises RequestError."""
    parts: list[Block] = []
    for at, block in enumerate(_blocks(content, where)):
        text = _text(block)
        if text is None:
            kind = str(block.get("type"))[:32]
            param = f"{where}[{at}]"
            raise RequestError(f"{param}: {kind!r} is not supported: send text", param=param)
        parts.append({"type": "text", "text": text, "cache_control": block.get("cache_control")})
    return parts


def _text(block: Any) -> str | None:  # noqa: ANN401 - as JSON has it
    """Return the text of a block; None if it has none."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "search_result", "content": list()}:
            found = cast("list[object]", block["content"])
            return "".join(_text(part) or "" for part in found)
        case _:
            return None


def _readable(block: Block) -> Block:
    """Return the block, or a text that marks it, which is the same in each turn."""
    return block if _text(block) is not None else {"type": "text", "text": UNREAD.format(block.get("type"))}


def _has_results_alone(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(block, dict) and cast("Block", block).get("type") == "tool_result"
        for block in cast("list[object]", content)
    )


def _result(block: Block, where: str) -> Turn:
    """Return the message with the result of a tool."""
    content = block.get("content")
    blocks = _blocks("" if content is None else content, f"{where}.content")
    parts = _parts([_readable(inner) for inner in blocks], f"{where}.content")
    if block.get("is_error") is True:
        parts.insert(0, {"type": "text", "text": "Error: "})
    if block.get("cache_control") is not None:
        parts.append({"type": "text", "text": "", "cache_control": block["cache_control"]})
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}


def _assistant(content: object, where: str) -> Turn:
    """Return an earlier answer of the model; blocks of other servers' tools are left out."""
    words: list[Block] = []
    thoughts: list[str] = []
    calls: list[Block] = []
    for block in _blocks(content, f"{where}.content"):
        match block:
            case {"type": "text", "text": str()}:
                words += _parts([block], f"{where}.content")
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use"}:
                called: Block = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "function": called})
            case _:
                pass
    return {
        "role": "assistant",
        "content": words,
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }
