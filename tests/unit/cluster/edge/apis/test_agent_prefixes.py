"""Prompts of agents begin as their earlier ones did, whatever they spell differently, and have breakpoints
where the next ones leave them."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.cluster.edge.http.test_hints import CHATS, FLAT_TOOL, MARK, TOOL, sent
from tidemill.workers.messages import Request

Body = dict[str, Any]
Spelling = Callable[[str], object]

SYSTEM = "You edit files. Be short."
QUESTION = "Where is the key?"
CALL = {"id": "call_1", "function": {"name": "look", "arguments": "{}"}}
ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}


def text(words: str) -> str:
    return words


def blocks(words: str, kind: str = "text") -> list[Body]:
    return [{"type": kind, "text": words[:5]}, {"type": kind, "text": words[5:]}]


def marked(words: str, kind: str = "text") -> list[Body]:
    first, last = blocks(words, kind)
    return [first, last | {"cache_control": MARK}]


def chat(spell: Spelling, turns: int, question: str) -> Body:
    result = {"role": "tool", "tool_call_id": "call_1", "content": spell("It is in the tower.")}
    messages = [{"role": "system", "content": spell(SYSTEM)}, {"role": "user", "content": spell(question)}]
    for _ in range(turns):
        messages += [{"role": "assistant", "content": spell("I look."), "tool_calls": [CALL]}, result]
    return {"messages": messages, "tools": [TOOL]}


def anthropic(spell: Spelling, turns: int, question: str) -> Body:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": spell("It is in the tower.")}
    messages: list[Body] = [{"role": "user", "content": spell(question)}]
    for _ in range(turns):
        words = [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "look", "input": {}},
        ]
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": [result]}]
    return {"system": spell(SYSTEM), "messages": messages, "tools": [ANTHROPIC_TOOL]}


def responses(spell: Spelling, turns: int, question: str) -> Body:
    called = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": spell("It is in the tower.")}
    items: list[Body] = [{"role": "user", "content": spell(question)}]
    for _ in range(turns):
        items += [{"role": "assistant", "content": spell("I look.")}, called, result]
    return {"instructions": SYSTEM, "input": items, "tools": [FLAT_TOOL]}


BODIES = {CHATS: chat, "/v1/messages": anthropic, "/v1/responses": responses}


def asked(path: str, body: Body) -> Request:
    status, request, reply, _ = sent(path, body)
    assert status == 200, reply.text
    assert request is not None
    return request


def common(left: Request, right: Request) -> int:
    """Return the number of tokens that two prompts share."""
    return next(
        (index for index, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=False)) if a != b),
        len(left.tokens),
    )


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("spell", [blocks, marked])
def test_spelling_of_texts_changes_no_token(path: str, spell: Spelling) -> None:
    plain = asked(path, BODIES[path](text, 1, QUESTION))
    assert asked(path, BODIES[path](spell, 1, QUESTION)).tokens == plain.tokens


@pytest.mark.parametrize("path", BODIES)
def test_next_requests_leave_a_prompt_at_its_breakpoints(path: str) -> None:
    make = BODIES[path]
    turns = [asked(path, make(text, count, QUESTION)) for count in range(4)]
    other = asked(path, make(text, 0, "Move the key."))
    for before, after in pairwise(turns):
        assert common(before, after) in before.breakpoints
        assert common(before, after) == len(before.tokens), "all of it, the head of the answer included"
        assert common(before, other) in before.breakpoints, "behind tools and system"


def moved_marks() -> Iterator[Body]:
    """Yield the body of a conversation with a mark on another message each."""
    for place in range(5):
        body = anthropic(blocks, 2, QUESTION)
        content = body["messages"][place]["content"]
        content[-1]["cache_control"] = MARK
        yield body


def test_mark_that_moves_changes_no_token() -> None:
    requests = [asked("/v1/messages", body) for body in moved_marks()]
    assert len({request.tokens for request in requests}) == 1
    assert len({request.breakpoints for request in requests}) > 1


@pytest.mark.parametrize("spell", [text, blocks])
def test_line_of_attribution_is_no_part_of_the_prompt(spell: Spelling) -> None:
    body = anthropic(spell, 1, QUESTION)
    plain = asked("/v1/messages", body)
    for version in ("2.1.197.b82; cc_entrypoint=sdk-cli; cch=9ff00;", "2.1.332.0c1; cc_entrypoint=cli;"):
        line = f"x-anthropic-billing-header: cc_version={version}"
        system = f"{line}\n{SYSTEM}" if spell is text else [{"type": "text", "text": line}, *blocks(SYSTEM)]
        assert asked("/v1/messages", body | {"system": system}).tokens == plain.tokens
