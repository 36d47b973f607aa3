"""The grammar of a whole answer: a thought, if the model may think, then the words or the calls. Pure.

    start: <think> thought </think> @answer
    thought: any text without </think>

A worker puts the constraint of the words, or the grammar of calls, where @answer stands.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tidemill.cluster.edge.chat.formats import BREAK, CHANNEL, CHANNELS, END, FINAL, MESSAGE, START
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.request.text_grammar import quoted
from tidemill.cluster.edge.chat.request.tool_grammar import (
    enforceable,
    forced,
    free,
    literal_of,
)
from tidemill.cluster.edge.chat.request.tools import Tool
from tidemill.workers.messages import Grammar, RequestError

ROLE = "assistant"
"""The role of the messages that a model in channels answers with."""

MAY_BREAK = re.compile(r"[\x00-\x1f]|\[\^|\(\?|\\[^bdw\W]|[%@~]|/[a-z]*s")
"""Matches what may stand for a line break in a pattern or grammar."""

THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
"""The text before the reasoning of a model that writes in channels."""


def words_or_calls(
    words: Grammar, tools: Sequence[Tool], output_format: OutputFormat, added: Mapping[str, int]
) -> Grammar:
    """Return the grammar of an answer that matches `words`, or calls tools if there are some. `added` has the
    texts that are single tokens.

    The arguments follow their schemas, if a grammar can hold those and follow them.
    """
    before = FINAL if output_format.channels and output_format.begun in ("", THOUGHT) else ""
    answer = behind_thought(words, output_format, added, before, breaks=_may_begin_with_break(words))
    if not tools:
        return answer
    calls = behind_thought(forced(free(tools, output_format), output_format, added), output_format, added)
    with suppress(RequestError):
        bound = forced(enforceable(tools)[0], output_format, added)
        calls = replace(behind_thought(bound, output_format, added), stand_in=calls)
    return replace(answer, otherwise=calls)


def _may_begin_with_break(words: Grammar) -> bool:
    """Return whether words may begin with BREAK, or perhaps do."""
    match words.kind:
        case "choice":
            return any(choice.startswith(BREAK) for choice in json.loads(words.text))
        case "regex" | "lark":
            return MAY_BREAK.search(words.text) is not None
        case "json_object" | "json_schema":
            return False


def behind_thought(
    answer: Grammar,
    output_format: OutputFormat,
    added: Mapping[str, int],
    before: str = "",
    *,
    breaks: bool = False,
) -> Grammar:
    """Return the grammar of an answer that has the text `before` it, and before that a thought as the format
    allows one, with BREAK behind it, which only is needed if it `breaks`."""
    thought = _thought_before(output_format, added, quoted(BREAK) if breaks else f"{quoted(BREAK)}?")
    if not thought and not before:
        return answer
    rules = [f"start: {thought} {literal_of(before, added)} @answer"]
    if thought and output_format.reasoning is not None:
        tags = CHANNELS if output_format.channels else (output_format.reasoning.close,)
        rules += _thought(output_format.reasoning.close or END, tags, added)
    return replace(answer, frame="\n".join(rules))


def _thought_before(output_format: OutputFormat, added: Mapping[str, int], rest: str) -> str:
    """Return the thoughts that an answer may have or must end, in Lark's syntax."""
    reasoning, begun = output_format.reasoning, output_format.begun
    if reasoning is None:
        return ""
    if output_format.channels:
        more = f"thought {literal_of(START + ROLE, added)}"
        any_more = f"({literal_of(THOUGHT, added)} {more})*"
        return {"": any_more, THOUGHT: f"{more} {any_more}"}.get(begun, "")
    thought = f"thought {rest}"
    if output_format.thinking:
        return thought
    opens = " | ".join(literal_of(tag, added) for tag in reasoning.opens)
    return f"(({opens}) {thought})?" if opens else ""


def _thought(close: str, tags: Sequence[str], added: Mapping[str, int]) -> list[str]:
    """Return the rules of a thought and the tag behind it. If that is a token, no other tokens spell the
    tags, which end a thought where its text is parsed."""
    text = "TEXT: /(?s:.*)/"
    if close not in added:
        return [f"thought[suffix={quoted(close)}]: TEXT", text]
    unclosed = f"THOUGHT: TEXT & ~(TEXT ({' | '.join(map(quoted, tags))}) TEXT)"
    return [f"thought: THOUGHT {literal_of(close, added)}", unclosed, text]
