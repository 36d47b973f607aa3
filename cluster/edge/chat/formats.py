"""The marks of tool calls and reasoning in models' texts, as data: an entry per format, by the names that
`--tool-call-parser` and `--reasoning-parser` take (vLLM's).

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    qwen3_coder   <tool_call><function=f><parameter=at>the harbor</parameter></function></tool_call>
    llama3_json   {"name": "f", "parameters": {...}}              alone, or behind <|python_tag|>
    pythonic      [f(at="the harbor"), g()]                       alone
    granite       <|tool_call|>[{"name": "f", "arguments": {...}}]
    deepseek_v3   <|tool_call_begin|>function<|tool_sep|>f ```json {...} ```<|tool_call_end|>
    deepseek_v31  <|tool_call_begin|>f<|tool_sep|>{...}<|tool_call_end|>
    openai        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tidemill.cluster.settings import ReasoningParser, ToolParser

CALL, CALLED = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
FUNCTION = "<function="
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL_END, RETURN = "<|end|>", "<|call|>", "<|return|>"

NAME = r'"([^"\\\x00-\x1f]*)"'
JSON_OPENING = re.compile(
    rf'\s*\[?\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{NAME}\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])'
)
SEP = "<\uff5ctool\u2581sep\uff5c>"


def _deepseek(word: str) -> str:
    """Return a DeepSeek tag, with the characters that it has instead of bars and underscores."""
    return f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>"


Body = Literal["json", "xml", "python", "channels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The text of forced calls: before the first, between two (None: only one is allowed), behind the last;
    and of each: before its name, between name and arguments, behind those."""

    before: str = ""
    between: str | None = "\n"
    behind: str = ""
    name: str
    arguments: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The marks of a call.

    begins   tags before a call
    ends     the tag behind it; empty: it ends where its brackets close, and another may follow
    bare     an answer that starts with this is a call without a tag
    opening  the text before the arguments, with the function's name
    dropped  meaningless tags around calls
    inner    tags within a call
    signs    texts that all stand in the chat templates of models with this format
    """

    body: Body
    begins: tuple[str, ...] = ()
    ends: str = ""
    bare: str = ""
    opening: re.Pattern[str] | None = None
    dropped: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    signs: tuple[str, ...]
    written: Written

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.begins, self.ends, *self.dropped, *self.inner)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The marks of reasoning.

    opens    tags that may begin it, at the start of an answer
    close    the tag behind it
    implied  an answer begins with it, unless the prompt has closed it
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    implied: bool = False

    def open_behind(self, prompt: str) -> bool:
        """Return whether an answer continues reasoning that the end of its prompt has begun."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.opens) or (self.implied and not prompt.endswith(self.close))

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.opens, self.close)))


BEGIN, END_OF_CALL = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_ALL_BEGIN, _ALL_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")

CHANNELS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL_END, RETURN)
FINAL = f"{CHANNEL}final{MESSAGE}"
"""The text before an answer's words, for a model that writes in channels."""

FORMS: dict[str, CallForm] = {
    "openai": CallForm(
        body="channels",
        inner=CHANNELS,
        signs=(CHANNEL,),
        written=Written(
            between=None,
            name=f"{CHANNEL}commentary to=functions.",
            arguments=f" {CONSTRAIN}json{MESSAGE}",
            end="",
        ),
    ),
    "deepseek_v3": CallForm(
        body="json",
        begins=(BEGIN,),
        ends=END_OF_CALL,
        opening=re.compile(rf"\s*\w*{SEP}([^\s{{`]+)\s*```json\s*(?=\{{)"),
        dropped=(_ALL_BEGIN, _ALL_END),
        inner=(SEP,),
        signs=(SEP, "```json"),
        written=Written(
            before=_ALL_BEGIN,
            behind=_ALL_END,
            name=f"{BEGIN}function{SEP}",
            arguments="\n```json\n",
            end=f"\n```{END_OF_CALL}",
        ),
    ),
    "deepseek_v31": CallForm(
        body="json",
        begins=(BEGIN,),
        ends=END_OF_CALL,
        opening=re.compile(rf"\s*([^\s{{<]+){SEP}\s*(?=\{{)"),
        dropped=(_ALL_BEGIN, _ALL_END),
        inner=(SEP,),
        signs=(SEP,),
        written=Written(
            before=_ALL_BEGIN, between="", behind=_ALL_END, name=BEGIN, arguments=SEP, end=END_OF_CALL
        ),
    ),
    "qwen3_coder": CallForm(
        body="xml",
        begins=(CALL, FUNCTION),
        ends=CALLED,
        opening=re.compile(r"\s*<function=([^>\s]+)>(?=\s*(?:<parameter=[^>\s]+>|</function>))"),
        signs=(CALL, FUNCTION),
        written=Written(
            name=f"{CALL}\n{FUNCTION}",
            arguments=">\n",
            end=f"</function>\n{CALLED}",
        ),
    ),
    "granite": CallForm(
        body="json",
        begins=("<|tool_call|>", CALL),
        opening=JSON_OPENING,
        signs=("<|tool_call|>",),
        written=Written(
            before="<|tool_call|>[",
            between=", ",
            behind="]",
            name='{"name": "',
            arguments='", "arguments": ',
            end="}",
        ),
    ),
    "hermes": CallForm(
        body="json",
        begins=(CALL,),
        ends=CALLED,
        opening=JSON_OPENING,
        signs=(CALL,),
        written=Written(
            name=f'{CALL}\n{{"name": "',
            arguments='", "arguments": ',
            end=f"}}\n{CALLED}",
        ),
    ),
    "pythonic": CallForm(
        body="python",
        bare="[",
        dropped=("<|python_start|>", "<|python_end|>"),
        signs=("func_name1(",),
        written=Written(before="[", between=", ", behind="]", name="", arguments="(", end=")"),
    ),
    "llama3_json": CallForm(
        body="json",
        begins=("<|python_tag|>",),
        bare="{",
        opening=JSON_OPENING,
        signs=('"name": ', '"parameters": '),
        written=Written(
            between="; ",
            name='{"name": "',
            arguments='", "parameters": ',
            end="}",
        ),
    ),
}
"""The formats by the names of their parsers; of several that match a template, the first counts."""

_THINK = Thinking(opens=(THINK,), close=THOUGHT)
THINKING: dict[str, Thinking] = {
    "openai_gptoss": Thinking(),
    "granite": Thinking(
        opens=("Here is my thought process:", "Here's my thought process:"), close="Here is my response:"
    ),
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_r1": Thinking(opens=(THINK,), close=THOUGHT, implied=True),
}
"""The reasoning marks by the names of their parsers."""

SPOKEN_IN_CHANNELS = THINKING["openai_gptoss"]

assert {*FORMS, "auto", "none"} == {*get_args(ToolParser)}
assert {*THINKING, "auto", "none"} == {*get_args(ReasoningParser)}
