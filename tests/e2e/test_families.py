"""Chats of one family over real processes: the second one resumes where it leaves the first one, on any
worker, and hints change no answer."""

from random import Random
from typing import Any

import httpx
import pytest

from tests.support.e2e.server import Server

pytestmark = pytest.mark.slow

PAGE_TOKENS = 64
WORDS = ("Alice", "keeps", "the", "key", "in", "harbor", "Tom", "likes", "Emma", "tower", "and", "a")
MARK = {"type": "ephemeral", "ttl": "1h"}


def system_of(seed: int) -> str:
    """Return a system prompt of several hundred tokens."""
    rng = Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(500)) + "."


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    reply = httpx.post(f"{server.url}{path}", json={"model": "keeper", **body}, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(server: Server, system: object, question: str, **hints: Any) -> tuple[str, int]:  # noqa: ANN401 - JSON
    """Return the answer, and the number of prompt tokens that no worker computed for it."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 8, **hints}
    reply = post(server, "/v1/chat/completions", **fields)
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], cached


def shared_tokens(server: Server, system: str) -> int:
    fields = {"messages": [{"role": "system", "content": system}], "add_generation_prompt": False}
    return post(server, "/tokenize", **fields)["count"]


def test_second_chat_of_a_family_computes_at_most_a_page_of_what_they_share(server: Server) -> None:
    """Also on new workers, after kill -9 of all that computed the first one: the store has the checkpoint."""
    system = system_of(1)
    shared = shared_tokens(server, system)
    assert shared > 5 * PAGE_TOKENS
    _, cold = ask(server, system, "Where is Emma?")
    _, second = ask(server, system, "Who keeps the key?")
    assert (cold, shared - second <= PAGE_TOKENS) == (0, True), second
    server.replace_workers()
    _, third = ask(server, system, "What does Tom like?")
    assert shared - third <= PAGE_TOKENS, third


def test_chat_finds_the_prefix_that_was_warmed(server: Server) -> None:
    system = system_of(2)
    messages = [{"role": "system", "content": system}]
    first = post(server, "/v1/prefixes", messages=messages)
    again = post(server, "/v1/prefixes", messages=messages, retain=60)
    assert (first["cached_tokens"], again["id"]) == (0, first["id"])
    assert again["tokens"] - again["cached_tokens"] <= PAGE_TOKENS
    _, cached = ask(server, system, "Where is Emma?")
    assert first["tokens"] - cached <= PAGE_TOKENS
    gone = httpx.delete(f"{server.url}/v1/prefixes/{first['id']}", timeout=300)
    assert gone.json() == {"id": first["id"], "object": "prefix", "deleted": True}


@pytest.mark.parametrize(
    "hints",
    [
        {"session_id": "s"},
        {"cache_control": MARK, "prompt_cache_key": "k"},
        {"nvext": {"agent_hints": {"priority": 3, "osl": 9}, "cache_control": MARK}},
    ],
)
def test_answers_do_not_depend_on_hints(server: Server, hints: dict[str, Any]) -> None:
    """Cold in a namespace of its own, and with a mark inside of the system prompt."""
    system, question = system_of(3), "Where does Alice keep the key?"
    expected, _ = ask(server, system, question)
    salt = f"hints-{len(str(hints))}"
    parts = [
        {"type": "text", "text": system[:800], "cache_control": MARK},
        {"type": "text", "text": system[800:]},
    ]
    for content in (parts, system):
        assert ask(server, content, question, cache_salt=salt, **hints)[0] == expected
