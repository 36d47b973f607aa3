"""The marks of tool calls and reasoning in models' texts, as data: an entry per format, by the names that
`--tool-call-parser` and `--reasoning-parser` take (vLLM's).

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    qwen3_coder   <tool_call><function=f><parameter=at>the harbor</parameter></function></tool_call>
    llama3_json   {"name": "f", "parameters": {...}}              alone, or behind <|python_tag|>
    pythonic      [f(at="the harbor"), g()]                       alone
    granite       <|tool_call|>[{"name": "f", "arguments": {...}}]
    deepseek_v3   <|tool_call_begin|>function<|tool_sep|>f ```json {...} ```<|tool_call_end|>
    deepseek_v31  <|tool_call_begin|>f<|tool_sep|>{...}<|tool_call_end|>
    deepseek_v32  <|DSML|invoke name="f"><|DSML|parameter name="at" string="true">the harbor...
    glm47         <tool_call>f<arg_key>at</arg_key><arg_value>the harbor</arg_value></tool_call>
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    minimax_m2    <minimax:tool_call><invoke name="f"><parameter name="at">the harbor</parameter></invoke>...
    mistral       [TOOL_CALLS]f[ARGS]{...}, or [TOOL_CALLS] [{"name": "f", "arguments": {...}}]
    gemma4        <|tool_call>call:f{at:<|"|>the harbor<|"|>,far:true}<tool_call|>
    openai        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tidemill.cluster.settings import ReasoningParser, ToolParser

CALL, CALLED = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
BREAK = "\n\n"
"""The text that may stand between a thought and what follows it."""

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL_END, RETURN = "<|end|>", "<|call|>", "<|return|>"

NAME = r'"([^"\\\x00-\x1f]*)"'
JSON_OPENING = re.compile(
    rf'\s*+\[?\s*+\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{NAME}\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])'
)
JSON_LEAD = re.compile(r"\s*\[?\s*")
PYTHON_LEAD = re.compile(r"\s*\[?\s*(?:[A-Za-z_][\w.-]*\s*)?")
SEP = "<\uff5ctool\u2581sep\uff5c>"
NUMBER = "{number}"
"""The place of a call's number in a text that is written."""


def _deepseek(word: str) -> str:
    """Return a DeepSeek tag, with the characters that it has instead of bars and underscores."""
    return f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>"


Body = Literal["json", "xml", "python", "gemma", "channels"]


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
class Parameters:
    """The marks of parameters that stand between tags.

    begins   the start of the text before one; empty: that is a name
    begun    where it is one: a part of the text before a value; what has no quotation mark ends by itself
    opening  the text before a value, with the parameter's name, and perhaps whether the value is a text
    ends     texts behind a value; the first is its own, the others begin what follows where that is missing
    closes   the tag behind the last one; empty: the call's own
    before   the text to write before a value: `{name}`, and `{is_text}` as true or false
    behind   the text to write behind it
    """

    begins: str = ""
    begun: re.Pattern[str] | None = None
    opening: re.Pattern[str]
    ends: tuple[str, ...]
    closes: str = ""
    before: str
    behind: str

    @property
    def end(self) -> str:
        """Return the end of a text as it is written."""
        return self.behind[: self.behind.index(self.ends[0])] + self.ends[0]

    @property
    def on_lines(self) -> bool:
        """Return whether a value has lines of its own."""
        return self.behind.startswith("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The marks of a call.

    begins      tags before a call
    ends        the tag behind it; empty: it ends where its brackets close, and another may follow
    element     the start of a call itself; it may also stand in `begins`
    bare        an answer that starts with this is a call without a tag
    lead        what may precede the first bracket of a call without an end tag
    opening     the text before the arguments; the one group that matches is the function's name
    without     the text of a call without arguments, with the function's name
    parameters  of a format without JSON
    dropped     meaningless tags around calls
    inner       tags within a call
    signs       texts that all stand in the chat templates of models with this format
    older       a text, and what models write whose template and tokens lack it
    """

    body: Body
    begins: tuple[str, ...] = ()
    ends: str = ""
    element: str = ""
    bare: str = ""
    lead: re.Pattern[str] = JSON_LEAD
    opening: re.Pattern[str] | None = None
    without: re.Pattern[str] | None = None
    parameters: Parameters | None = None
    dropped: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    signs: tuple[str, ...]
    written: Written
    older: tuple[str, Written] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.begins, self.ends, *self.dropped, *self.inner)))

    def starts(self, functions: Iterable[str]) -> tuple[str, ...]:
        """Return the starts of calls that no tag precedes, where any object may be one."""
        if self.element:
            return (self.element,)
        head = self.written.name.partition(self.begins[0])[2] if self.begins else self.written.name
        named = () if self.opening is JSON_OPENING else (head + name for name in functions)
        return (*(("{",) if self.body == "json" else ()), *named)

    def of(self, template: str, added: Collection[str]) -> "CallForm":
        """Return the form of a model by the text of its template and its added tokens."""
        if self.older is None or self.older[0] in template or self.older[0] in added:
            return self
        return replace(self, written=self.older[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The marks of reasoning.

    opens    tags that may begin it, at the start of an answer
    close    the tag behind it
    implied  an answer begins with it, unless the prompt has closed it
    kept     it stays a part of the words, with its tags
    signs    texts that all stand in the templates of such models
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    implied: bool = False
    kept: bool = False
    signs: tuple[str, ...] = ()

    def open_behind(self, prompt: str) -> bool:
        """Return whether an answer continues reasoning that the end of its prompt has begun."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.opens) or (self.implied and not prompt.endswith(self.close))

    def closed_behind(self, prompt: str) -> bool:
        """Return whether the end of a prompt has closed its reasoning."""
        return bool(self.close) and prompt.rstrip().endswith(self.close)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.opens, self.close)))


BEGIN, END_OF_CALL = _deepseek("tool_call_begin"), _deepseek("tool_call_end")
_ALL_BEGIN, _ALL_END = _deepseek("tool_calls_begin"), _deepseek("tool_calls_end")
FUNCTION = "<function="

DSML = "\uff5cDSML\uff5c"
QUOTE = '<|"|>'
"""The quotation mark of Gemma."""

KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END = (
    f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end")
)
_KIMI_NAME = rf"\s*(?:functions\.)?([^\s<>{{}}:]{{1,128}})(?::\d{{1,9}})?\s*{re.escape(KIMI_ARGUMENTS)}\s*"
KIMI_CALLS, KIMI_CALLS_END = (f"<|tool_calls_section_{word}|>" for word in ("begin", "end"))
ARGUMENT_KEY, ARGUMENT_KEY_END = "<arg_key>", "</arg_key>"
ARGUMENT, ARGUMENT_END = "<arg_value>", "</arg_value>"

CHANNELS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL_END, RETURN)
FINAL = f"{CHANNEL}final{MESSAGE}"
"""The text before an answer's words, for a model that writes in channels."""


def _invoked(begin: str, end: str, mark: str = "", text: str = "", sign: str = "") -> CallForm:
    """Return the form of `<invoke name="f"><parameter name="at">`; `mark` stands in its tags, and `text` has
    the attribute by which texts and JSON differ."""
    invoke, parameter, invoked = f"<{mark}invoke name=", f"<{mark}parameter name=", f"</{mark}invoke>"
    named = r"""["']?([^"'<>]*?[^"'<>\s])\s*+["']?"""
    opening = rf"\s*{parameter}{named}(?:\s*+string=\"(true|false)\")?+\s*+>"
    missing = (f"\n{parameter}", f"\n{invoked}")
    return CallForm(
        body="xml",
        begins=(begin, invoke),
        ends=end,
        element=invoke,
        opening=re.compile(rf"\s*{invoke}{named}\s*+>(?=\s*(?:{parameter}[^<>]*>|{invoked}))"),
        without=re.compile(rf"\s*{invoke}{named}\s*+>\s*(?:{invoked}\s*)?"),
        parameters=Parameters(
            begins=parameter,
            opening=re.compile(opening),
            ends=(f"</{mark}parameter>", *missing),
            closes=invoked,
            before=f'{parameter}"{{name}}"{text}>',
            behind=f"</{mark}parameter>\n",
        ),
        inner=(mark,),
        signs=(sign or begin,),
        written=Written(
            before=f"{begin}\n", behind=f"\n{end}", name=f'{invoke}"', arguments='">\n', end=invoked
        ),
    )


def _keyed(line: str, sign: str) -> CallForm:
    """Return the form of `f<arg_key>at</arg_key><arg_value>the harbor</arg_value>`, with what stands between
    the tags."""
    between = ARGUMENT_KEY_END + line + ARGUMENT
    return CallForm(
        body="xml",
        begins=(CALL,),
        ends=CALLED,
        opening=re.compile(rf"\s*([^\s<>{{}}]{{1,128}})\s*(?={ARGUMENT_KEY})"),
        without=re.compile(r"\s*([^\s<>{}]+)\s*"),
        parameters=Parameters(
            begins=ARGUMENT_KEY,
            opening=re.compile(rf"\s*{ARGUMENT_KEY}\s*+([^<>]*?[^<>\s])\s*+{ARGUMENT_KEY_END}\s*{ARGUMENT}"),
            ends=(ARGUMENT_END, ARGUMENT_KEY, f"\n{ARGUMENT_KEY}"),
            before=f"{ARGUMENT_KEY}{{name}}{between}",
            behind=ARGUMENT_END + line,
        ),
        inner=(ARGUMENT_KEY, ARGUMENT_KEY_END, ARGUMENT, ARGUMENT_END),
        signs=(CALL, sign),
        written=Written(between=line, name=CALL, arguments=line, end=CALLED),
    )


def _json_list(before: str) -> Written:
    """Return the text of calls in a list: `[{"name": "f", "arguments": {"at": "the harbor"}}]`."""
    return Written(
        before=before, between=", ", behind="]", name='{"name": "', arguments='", "arguments": ', end="}"
    )


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
        without=re.compile(rf"\s*([^\s{{<]+){SEP}\s*(?:null\s*)?"),
        dropped=(_ALL_BEGIN, _ALL_END),
        inner=(SEP,),
        signs=(SEP,),
        written=Written(
            before=_ALL_BEGIN, between="", behind=_ALL_END, name=BEGIN, arguments=SEP, end=END_OF_CALL
        ),
    ),
    "deepseek_v32": _invoked(
        f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML, ' string="{is_text}"', DSML
    ),
    "minimax_m2": _invoked("<minimax:tool_call>", "</minimax:tool_call>"),
    "kimi_k2": CallForm(
        body="json",
        begins=(KIMI_BEGIN,),
        ends=KIMI_END,
        opening=re.compile(rf"{_KIMI_NAME}(?=\{{)"),
        without=re.compile(rf"{_KIMI_NAME}(?:null\s*)?"),
        dropped=(KIMI_CALLS, KIMI_CALLS_END),
        inner=(KIMI_ARGUMENTS,),
        signs=(KIMI_CALLS,),
        written=Written(
            before=KIMI_CALLS,
            between="",
            behind=KIMI_CALLS_END,
            name=f"{KIMI_BEGIN}functions.",
            arguments=f":{NUMBER}{KIMI_ARGUMENTS}",
            end=KIMI_END,
        ),
    ),
    "mistral": CallForm(
        body="json",
        begins=("[TOOL_CALLS]",),
        lead=re.compile(r"\s*(?:\[\s*)?[\w.\-\[\]]{0,192}\s*"),
        opening=re.compile(
            rf"{JSON_OPENING.pattern}|\s*([\w.-]{{1,128}})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)"
        ),
        without=re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*"),
        inner=("[ARGS]", "[CALL_ID]"),
        signs=("[TOOL_CALLS]",),
        written=Written(between="", name="[TOOL_CALLS]", arguments="[ARGS]", end=""),
        older=(
            "[ARGS]",
            _json_list("[TOOL_CALLS] ["),
        ),
    ),
    "gemma4": CallForm(
        body="gemma",
        begins=("<|tool_call>",),
        ends="<tool_call|>",
        element="call:",
        opening=re.compile(r"\s*(?:call)?:([^\s:<>{}]{1,128})\s*\{"),
        without=re.compile(r"\s*(?:call)?:([^\s:<>{}]+)\s*"),
        parameters=Parameters(
            begun=re.compile(r',?\s*+[^\s:,<>{}]*\s*+(?::\s*(?:<\|?"?\|?)?)?'),
            opening=re.compile(rf"\s*+,?\s*+([^\s:,<>{{}}]+)\s*:\s*(?:({re.escape(QUOTE)})|(?=[^<\s]))"),
            ends=(QUOTE,),
            closes="}",
            before="{name}:",
            behind=QUOTE,
        ),
        inner=(QUOTE,),
        signs=("<|tool_call>call:",),
        written=Written(between="", name="<|tool_call>call:", arguments="{", end="}<tool_call|>"),
    ),
    "glm47": _keyed("", ARGUMENT_KEY_END + ARGUMENT),
    "glm45": _keyed("\n", ARGUMENT_KEY),
    "qwen3_coder": CallForm(
        body="xml",
        begins=(CALL, FUNCTION),
        ends=CALLED,
        element=FUNCTION,
        opening=re.compile(r"\s*<function=([^>\s]+)>(?=\s*(?:<parameter=[^>\s]+>|</function>))"),
        without=re.compile(r"\s*<function=([^>\s]+)>\s*(?:</function>\s*)?"),
        parameters=Parameters(
            begins="<parameter=",
            opening=re.compile(r"\s*<parameter=([^>\s]+)>(?:\n|(?=[^\n]))"),
            ends=("</parameter>", "\n</parameter>", "\n<parameter=", "\n</function>"),
            closes="</function>",
            before="<parameter={name}>\n",
            behind="\n</parameter>\n",
        ),
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
        written=_json_list("<|tool_call|>["),
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
        lead=PYTHON_LEAD,
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
_IMPLIED = replace(_THINK, implied=True)
THINKING: dict[str, Thinking] = {
    "openai_gptoss": Thinking(),
    "granite": Thinking(
        opens=("Here is my thought process:", "Here's my thought process:"), close="Here is my response:"
    ),
    "gemma4": Thinking(opens=("<|channel>thought",), close="<channel|>"),
    "mistral": Thinking(opens=("[THINK]",), close="[/THINK]"),
    "kimi_k2": replace(_IMPLIED, signs=(KIMI_CALLS, THOUGHT)),
    "qwen3": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "nemotron_v3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_r1": _IMPLIED,
    "minimax_m2": _IMPLIED,
    "minimax_m2_append_think": replace(_IMPLIED, kept=True),
}
"""The reasoning marks by the names of their parsers."""

SPOKEN_IN_CHANNELS = THINKING["openai_gptoss"]

assert {*FORMS, "auto", "none"} == {*get_args(ToolParser)}
assert {*THINKING, "auto", "none"} == {*get_args(ReasoningParser)}
