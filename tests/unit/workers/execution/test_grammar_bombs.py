"""Grammars made to explode are refused, or followed within the limits; a mask is never empty."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest

from tests.support.workers.masks import allowed
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError
from tidemill.workers.sources.names import bundled

EOS = 1
STEPS = 40


@cache
def grammars() -> Grammars:
    return Grammars(bundled()["keeper"], 896, {EOS})


def chain(length: int) -> str:
    """Twice as many ways in each link as in the one before."""
    links: dict[str, object] = {
        f"d{at}": {"properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in "ab"}}
        for at in range(length)
    }
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def objects(many: str, count: int) -> str:
    return json.dumps({many: [{"properties": {f"k{at}": {"type": "string"}}} for at in range(count)]})


BOMBS: dict[str, Callable[[], Grammar]] = {
    "nested plus": lambda: Grammar(kind="regex", text="(a+)+b"),
    "ambiguous": lambda: Grammar(kind="regex", text="((a|a)|(a|a))*" * 20 + "b"),
    "counted thrice": lambda: Grammar(kind="regex", text="((a{1,1000}){1,1000}){1,1000}"),
    "counted tails": lambda: Grammar(kind="regex", text="(.*a.{200}){50}"),
    "parentheses": lambda: Grammar(kind="regex", text="(" * 20_000 + "a" + ")" * 20_000),
    "maybe": lambda: Grammar(kind="regex", text="a?" * 1000 + "a" * 1000),
    "words": lambda: Grammar(kind="regex", text=r"(\w{1,200}\s){1,200}"),
    "chain": lambda: Grammar(kind="json_schema", text=chain(300)),
    "itself": lambda: Grammar(kind="json_schema", text='{"$ref": "#"}'),
    "many values": lambda: Grammar(kind="json_schema", text=json.dumps({"enum": list(range(8000))})),
    "any of many": lambda: Grammar(kind="json_schema", text=objects("anyOf", 200)),
    "all of many": lambda: Grammar(kind="json_schema", text=objects("allOf", 800)),
    "pattern": lambda: Grammar(kind="json_schema", text='{"type": "string", "pattern": "^((a|aa)+)+$"}'),
    "empty loops": lambda: Grammar(kind="lark", text='start: a*\na: b*\nb: c*\nc: "x"?'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_does_not_go_off(name: str) -> None:
    bomb = BOMBS[name]()
    try:
        matcher = grammars().matcher(bomb)
    except RequestError:
        return
    assert len(bomb.text.encode()) <= GRAMMAR_BYTES_MAX
    with suppress(RequestError):
        for _ in range(STEPS):
            may = [int(token) for token in allowed(matcher).nonzero()[0]]
            assert may
            matcher.push(may[-1])
