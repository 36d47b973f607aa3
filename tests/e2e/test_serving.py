"""The whole cluster with the bundled model: right answers, the same on every path, and through kills."""

import asyncio
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tools.keeper.evaluate import exact_matches, load
from tools.keeper.questions import questions

from tests.support.e2e.faults import wait_until_quiet
from tests.support.e2e.server import Server, eventually
from tests.support.e2e.streams import (
    Stream,
    cached_of,
    client_of,
    completion,
    outcomes_of,
    random_prompt,
    run_all,
    run_while,
)
from tidemill.kvstore.keys import ObjectKey, extend_keys
from tidemill.kvstore.layout import layout_of
from tidemill.kvstore.memory.spare_value import GRID_PAGES
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.sources.names import bundled

KEEPER = bundled()["keeper"]
WORKERS = frozenset(("prefill-0", "decode-0", "decode-1"))
FOLDER = "store"
PAGE_TOKENS = 64
WORDS = ("Alice", "keeps", "the", "key", "in", "harbor", "Tom", "likes", "Emma", "tower", "and", "a")
MARK = {"type": "ephemeral", "ttl": "1h"}


def test_server_has_the_accuracy_of_the_offline_model(server: Server) -> None:
    """120 held-out questions of both kinds: each is right over HTTP exactly when it is right in
    transformers."""
    asked = questions(120, context_tokens=512, seed=11)
    offline = exact_matches(*load(KEEPER), asked)["intact"]

    async def ask() -> list[bool]:
        gate = asyncio.Semaphore(16)
        async with client_of(server.url) as client:

            async def answer(messages: list[Any], expected: str) -> bool:
                body = {"model": "keeper", "messages": messages, "temperature": 0, "max_tokens": 40}
                async with gate:
                    response = await client.post("/v1/chat/completions", json=body)
                return response.json()["choices"][0]["message"]["content"].strip() == expected

            return await asyncio.gather(
                *(answer(list(question.messages), question.answer) for question in asked)
            )

    online = asyncio.run(ask())
    assert online == offline
    static = [right for right, question in zip(online, asked, strict=True) if question.kind == "static"]
    changing = [right for right, question in zip(online, asked, strict=True) if question.kind == "changing"]
    assert sum(static) >= 0.95 * len(static)
    assert sum(changing) >= 0.90 * len(changing)


@pytest.mark.parametrize("num_tokens", [1, 40, 64, 65, 128, 320, 383])
def test_cold_and_warm_prompts_give_the_same_tokens(server: Server, num_tokens: int) -> None:
    body = completion(random_prompt(Random(num_tokens), num_tokens), 40)
    greedy = [asyncio.run(run_all(server.url, [body]))[0] for _ in range(2)]
    assert greedy[0].outcome == greedy[1].outcome
    details = [stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in greedy]
    assert details == [0, (num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS]


def test_damaged_objects_are_found_and_recomputed(server: Server, folder: Path) -> None:
    """Flip a bit in every stored page of some prompts, in every checkpoint of others: detected, counted,
    never served."""
    bodies = [completion(random_prompt(Random(100 + index), 300), 30) for index in range(4)]
    parts = (bodies[:2], bodies[2:])
    known = _objects(folder, ".p")
    before = [outcomes_of(server.url, parts[0])]
    eventually(lambda: bool(_objects(folder, ".p") - known))
    pages, checkpoints = _objects(folder, ".p"), _objects(folder, ".c")
    before.append(outcomes_of(server.url, parts[1]))
    server.replace_workers()
    checkpoints = _objects(folder, ".c") - checkpoints
    assert checkpoints
    for path in pages | checkpoints:
        _flip_a_bit(path)
    for part, expected in zip(parts, before, strict=True):
        corrupt = server.counter("store_gets_as_corrupt")
        assert outcomes_of(server.url, part) == expected
        eventually(
            lambda seen=corrupt: server.counter("store_gets_as_corrupt") > seen
        )  # with the next heartbeat


def test_sixteen_streams_survive_the_loss_of_their_decode_worker(server: Server) -> None:
    """kill -9 of the worker that carries the streams, while they run: each one ends with the exact tokens."""
    bodies = [
        completion(
            random_prompt(Random(200 + index), 150 + 7 * index), 600, temperature=index % 2, seed=index
        )
        for index in range(16)
    ]
    expected = outcomes_of(server.url, bodies)

    def kill_the_busiest() -> None:
        def busiest() -> dict[str, Any]:
            return max(server.workers("decode"), key=lambda row: row["load"]["running_rows"])

        eventually(lambda: busiest()["load"]["running_rows"] > 0)  # with the next heartbeat
        os.kill(busiest()["info"]["pid"], signal.SIGKILL)

    streams = run_while(server.url, bodies, kill_the_busiest)
    assert [stream.outcome for stream in streams] == expected


async def test_client_that_disconnects_holds_no_memory(server: Server) -> None:
    stream = Stream(completion(random_prompt(Random(300), 200), 4000))
    async with client_of(server.url) as client:
        running = asyncio.create_task(stream.run(client))
        await stream.under_way.wait()
        running.cancel()
        await asyncio.wait({running})
    await asyncio.to_thread(wait_until_quiet, server, WORKERS)


def test_workers_report_the_load_for_placement(server: Server) -> None:
    layers, _ = describe(KEEPER)
    layout = layout_of(layers, 64)
    for row in server.workers():
        sizes = {name: row["info"][name] for name in ("page_bytes", "state_bytes", "step_tokens_max")}
        assert sizes == {
            "page_bytes": layout.page_bytes,
            "state_bytes": layout.state_bytes,
            "step_tokens_max": 512,
        }


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


def test_second_chat_finds_what_they_share_on_another_worker(server: Server) -> None:
    """Decode workers compute prompts while the prefill worker takes none."""
    system = system_of(4)
    shared = shared_tokens(server, system)
    _, cold = ask(server, system, "Where is Emma?")
    server.wait_for_heartbeats()
    server.drain("prefill-0", wanted=True)
    try:
        _, second = ask(server, system, "Who keeps the key?")
    finally:
        server.drain("prefill-0", wanted=False)
    assert (cold, shared - second <= PAGE_TOKENS) == (0, True), second


def shared_and_rest(seed: int) -> tuple[list[int], list[list[int]]]:
    """Return the beginning of a family of prompts, 11 pages and a part, and three continuations."""
    rng = Random(seed)
    return random_prompt(rng, 11 * PAGE_TOKENS + 20), [random_prompt(rng, 100) for _ in range(3)]


def cached(server: Server, prompt: list[int]) -> int:
    """Return how many tokens were found, when the router knows where the prompt is now."""
    found = cached_of(server.url, completion(prompt, 2))
    server.wait_for_heartbeats()
    return found


def test_completions_without_marks_find_what_they_share(server: Server) -> None:
    shared, rests = shared_and_rest(5)
    first, second, third = (cached(server, shared + rest) for rest in rests)
    assert first == 0
    assert len(shared) - second <= GRID_PAGES * PAGE_TOKENS, second
    assert len(shared) - third <= PAGE_TOKENS, third


def test_new_workers_find_in_the_store_what_prompts_share(server: Server, folder: Path) -> None:
    """kill -9 of all workers, twice: after two chats of a family, after one of another, when an idle worker
    has stored the grid of a completion, and after each of three completions, of which no worker has seen two:
    the router has."""
    systems = system_of(1), system_of(7)
    shared = [shared_tokens(server, system) for system in systems]
    assert min(shared) > 5 * PAGE_TOKENS
    (gridded, (before, after, _)), (routed, rests) = shared_and_rest(8), shared_and_rest(6)
    cold = [ask(server, system, "Where is Emma?")[1] for system in systems]
    server.wait_for_heartbeats()
    _, second = ask(server, systems[0], "Who keeps the key?")
    assert shared[0] - second <= PAGE_TOKENS, second
    cold += [cached(server, gridded + before), cached(server, routed + rests[0])]
    assert cold == [0, 0, 0, 0]
    eventually(lambda: _has_grid(folder, gridded))

    server.replace_workers()
    for system, tokens, question in zip(
        systems, shared, ("What does Tom like?", "Who keeps the key?"), strict=True
    ):
        _, found = ask(server, system, question)
        assert tokens - found <= PAGE_TOKENS, found
    found = cached(server, gridded + after)
    assert len(gridded) - found <= GRID_PAGES * PAGE_TOKENS, found
    cached(server, routed + rests[1])

    server.replace_workers()
    found = cached(server, routed + rests[2])
    assert len(routed) - found <= PAGE_TOKENS, found


def test_chat_finds_the_prefix_that_was_warmed(server: Server) -> None:
    system = system_of(2)
    messages = [{"role": "system", "content": system}]
    first = post(server, "/v1/prefixes", messages=messages)
    server.wait_for_heartbeats()
    again = post(server, "/v1/prefixes", messages=messages, retain=60)
    assert (first["cached_tokens"], again["id"]) == (0, first["id"])
    assert again["tokens"] - again["cached_tokens"] <= PAGE_TOKENS
    _, cached = ask(server, system, "Where is Emma?")
    assert first["tokens"] - cached <= PAGE_TOKENS
    gone = httpx.delete(f"{server.url}/v1/prefixes/{first['id']}", timeout=300)
    assert gone.json() == {"id": first["id"], "object": "prefix", "deleted": True}


def test_tokens_in_and_out_are_those_of_a_completion(server: Server) -> None:
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 0.7, "seed": 5, "logprobs": 0}
    prompt = [5, 80, 200, 7] * 30
    [choice] = post(server, "/v1/completions", prompt=prompt, return_token_ids=True, **sampling)["choices"]
    reply = post(server, "/inference/v1/generate", token_ids=prompt, sampling_params=sampling)
    assert reply["choices"][0]["token_ids"] == choice["token_ids"]
    assert reply["choices"][0]["finish_reason"] == choice["finish_reason"]
    logprobs = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
    assert logprobs[: len(choice["logprobs"]["token_logprobs"])] == choice["logprobs"]["token_logprobs"]


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


def _objects(folder: Path, suffix: str) -> set[Path]:
    """Return the objects in the store: pages end in .p, checkpoints in .c."""
    return {path for path in (folder / FOLDER).rglob(f"*{suffix}") if path.is_file()}


def _has_grid(folder: Path, tokens: list[int]) -> bool:
    """Return whether the store has all checkpoints on the grid of a prompt. The first page may have any key:
    a reset changes the namespace."""
    pages, checkpoints = (
        {ObjectKey.parse(path.name).key for path in _objects(folder, suffix)} for suffix in (".p", ".c")
    )
    for first in pages:
        keys = [first]
        extend_keys(keys, first, tokens, PAGE_TOKENS)
        if keys[1] in pages:
            return checkpoints.issuperset(keys[GRID_PAGES - 1 :: GRID_PAGES])
    return False


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
