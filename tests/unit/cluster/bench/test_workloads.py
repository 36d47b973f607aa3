"""Workloads of `tidemill bench`: seeded, with the shapes and prefixes that they claim, and their arrivals."""

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.bench.client import COMPLETIONS, LoadClient, messages_of
from tidemill.cluster.bench.command import open_http
from tidemill.cluster.bench.files import BadWorkload, ShareGptFile, TraceFile, sharegpt, trace
from tidemill.cluster.bench.load import arrivals_s, timed
from tidemill.cluster.bench.workloads import (
    AgentsShape,
    GspShape,
    Item,
    MultiTurnShape,
    RandomShape,
    Shape,
    Workload,
    agents,
    generated,
    gsp,
    multi_turn,
    random_prompts,
)

SMALL: dict[str, Shape] = {
    "random": RandomShape(num_prompts=9, input_len=20, range_ratio=0.5),
    "prefix": RandomShape(num_prompts=9, input_len=20, prefix_len=7),
    "gsp": GspShape(num_groups=4, prompts_per_group=3, system_prompt_len=50, range_ratio=0.2),
    "multi-turn": MultiTurnShape(),
    "agents": AgentsShape(num_turns=3, system_prompt_len=100),
}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(SMALL)))
def test_workloads_are_seeded_and_share_their_prefixes(seed: int, name: str) -> None:
    workload = generated(Random(seed), 896, SMALL[name])
    assert workload == generated(Random(seed), 896, SMALL[name])
    assert workload != generated(Random(seed + 1), 896, SMALL[name])
    for index, item in enumerate(workload.items):
        assert item.after is None or item.after < index
        assert min(item.tokens) >= 0
        assert max(item.tokens) < 896
        earlier = [other for other in workload.items[:index] if other.group == item.group]
        assert item.position == len(earlier)
        if item.position:
            assert 0 < item.shared_tokens < len(item.tokens)
            shared = item.tokens[: item.shared_tokens]
            assert any(other.tokens[: item.shared_tokens] == shared for other in earlier)


def test_lengths_of_random_prompts_are_those_of_vllm() -> None:
    shape = RandomShape(num_prompts=2000, input_len=100, output_len=10, range_ratio=0.3, prefix_len=5)
    items = random_prompts(Random(0), 896, shape).items
    lengths = [len(item.tokens) - 5 for item in items]
    assert (min(lengths), max(lengths)) == (70, 130)
    assert {item.max_tokens for item in items} == set(range(7, 14))
    assert mean(lengths) == pytest.approx(100, rel=0.02)
    assert {item.tokens[:5] for item in items} == {items[0].tokens[:5]}


def test_groups_are_those_of_sglang() -> None:
    shape = GspShape(num_groups=5, prompts_per_group=4, system_prompt_len=30, question_len=7, output_len=3)
    shuffled = gsp(Random(0), 896, shape).items
    assert {len(item.tokens) for item in shuffled} == {37}
    assert {item.max_tokens for item in shuffled} == {3}
    assert len({item.tokens[:30] for item in shuffled}) == 5
    assert [item.group for item in shuffled] != sorted(item.group for item in shuffled)
    ordered = GspShape(num_groups=5, prompts_per_group=4, system_prompt_len=30, ordered=True)
    assert [item.group for item in gsp(Random(0), 896, ordered).items] == [
        group for group in range(5) for _ in range(4)
    ]


def test_pauses_of_agents_have_a_long_tail() -> None:
    items = agents(Random(0), 896, AgentsShape(num_sessions=64, system_prompt_len=16)).items
    pauses = sorted(item.pause_s for item in items if item.hints)
    assert pauses[len(pauses) // 2] == pytest.approx(1.0, rel=0.2)
    assert sum(pauses[-len(pauses) // 10 :]) > 0.3 * sum(pauses)


def test_chat_has_the_turns_as_messages() -> None:
    items = multi_turn(Random(0), 896, MultiTurnShape(num_conversations=1, num_turns=3)).items
    chats = [messages_of(item) for item in items]
    assert [[message["role"] for message in chat] for chat in chats] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
    ]
    for earlier, later in pairwise(chats):
        assert later[: len(earlier)] == earlier
    for item, chat in zip(items, chats, strict=True):
        assert sum(len(message["content"].split()) for message in chat) == len(item.tokens)


def test_body_has_the_fields_of_its_endpoint() -> None:
    item = Item(
        tokens=(20, 21), max_tokens=3, group=0, position=0, shared_tokens=0, hints={"session_id": "a"}
    )
    plain = LoadClient(http=open_http("http://x"), clock_s=lambda: 0.0, model="m", fields={"top_p": 0.5})
    assert replace(plain, hints=True).body(item) == {
        "top_p": 0.5,
        "session_id": "a",
        "prompt": (20, 21),
        "model": "m",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = replace(plain, endpoint="/openai/v1/chat/completions").body(item)
    assert chat["messages"] == [{"role": "user", "content": "case week"}]
    assert not {"prompt", "session_id"} & set(chat)
    assert plain.endpoint == COMPLETIONS


def test_sharegpt_file(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    talks = [
        {"id": str(number), "conversations": [
            {"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "word " * number},
        ]}
        for number in range(1, 40)
    ]  # fmt: skip
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "alone"}]}, "junk", *talks]))
    workload = sharegpt(ShareGptFile(path=path, num_prompts=20), Random(1))
    assert workload == sharegpt(ShareGptFile(path=path, num_prompts=20), Random(1))
    assert len(workload.items) == 20
    for item in workload.items:
        number = int(item.text.removeprefix("question "))
        assert item.max_tokens == max(4, number * 5 // 4)
        assert messages_of(item) == [{"role": "user", "content": item.text}]
    fixed = sharegpt(ShareGptFile(path=path, num_prompts=20, output_len=9), Random(1))
    assert {item.max_tokens for item in fixed.items} == {9}


@pytest.mark.parametrize("content", ["{", "{}", "[]", '[{"conversations": [{"value": 1}, {"value": 2}]}]'])
def test_wrong_sharegpt_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(BadWorkload, match=r"wrong\.json"):
        sharegpt(ShareGptFile(path=path, num_prompts=1), Random(0))


def test_trace_shares_the_blocks_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        (1000, 1100, [1, 2, 3]),
        (1500, 1100, [1, 2, 4]),
        (4000, 600, [9, 8]),
        (5000, 700, [1]),
    ]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": prompt, "output_length": 5, "hash_ids": blocks})
            for at, prompt, blocks in rows
        )
    )
    workload = trace(TraceFile(path=path, num_prompts=10), 896, 3)
    assert workload == trace(TraceFile(path=path, num_prompts=10), 896, 3)
    first, second, third, fourth = workload.items
    assert [len(item.tokens) for item in workload.items] == [1100, 1100, 600, 700]
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:] != second.tokens[1024:]
    assert third.tokens[:512] != first.tokens[:512] == fourth.tokens[:512]
    assert fourth.tokens[512:] != first.tokens[512:700]
    assert [item.shared_tokens for item in workload.items] == [0, 1024, 0, 512]
    assert [item.position for item in workload.items] == [0, 1, 0, 2]
    own = timed(workload, Random(0), self_timed=True)
    assert [item.at_s for item in own.items] == [0.0, 0.5, 3.0, 4.0]
    faster = timed(workload, Random(0), rate=10, self_timed=True)
    assert [item.at_s for item in faster.items] == pytest.approx([0.0, 0.05, 0.3, 0.4])
    assert len(trace(TraceFile(path=path, num_prompts=2), 896, 3).items) == 2


@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 50),
    rate=st.floats(0.1, 1000),
    burstiness=st.floats(0.05, 50) | st.just(inf),
)
def test_arrivals_ascend_and_keep_their_rate(seed: int, count: int, rate: float, burstiness: float) -> None:
    times_s = arrivals_s(count, rate, burstiness, Random(seed))
    assert times_s == arrivals_s(count, rate, burstiness, Random(seed))
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s[-1] == pytest.approx(count / rate)


def test_burstiness_is_the_shape_of_a_gamma_distribution() -> None:
    for burstiness, variation in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (inf, 0.0)):
        times_s = arrivals_s(20_000, 5.0, burstiness, Random(0))
        gaps_s = [after - before for before, after in pairwise(times_s)]
        assert pstdev(gaps_s) / mean(gaps_s) == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert arrivals_s(3, inf, 1.0, Random(0)) == [0.0] * 3


def test_only_the_first_turn_of_a_conversation_has_an_arrival() -> None:
    workload = multi_turn(Random(0), 896, MultiTurnShape(num_conversations=3, num_turns=2))
    items = timed(workload, Random(0), rate=1.0).items
    assert [item.at_s > 0 for item in items] == [True, False] * 3
    assert items[4].at_s == pytest.approx(3.0)
    assert timed(Workload("none", ()), Random(0), rate=1.0).items == ()
