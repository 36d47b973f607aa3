"""The workloads of the memory benchmark: seeded, and true to what they say is shared."""

import json
from collections.abc import Callable
from random import Random

import pytest
from benchmarks.memory import workloads
from benchmarks.memory.served_model import answer_token

from tidemill.cluster.bench.workloads import Workload

pytestmark = pytest.mark.slow

MAKERS: dict[str, Callable[[Random], Workload]] = {
    "long-prompts": lambda rng: workloads.long_prompts(rng, documents=5, in_turn=3),
    "long-generations": lambda rng: workloads.long_generations(rng, prompts=5),
    "alternating": lambda rng: workloads.alternating(rng, documents=3, prompts=4),
    "mixed": lambda rng: workloads.mixed(rng, prompts=5),
    "multi-turn": lambda rng: workloads.multi_turn(rng, conversations=8, open_at_once=3),
    "shared-prefix": lambda rng: workloads.shared_prefix(rng, prompts=10),
}


@pytest.mark.parametrize("name", MAKERS)
def test_workload_follows_its_seed_and_shares_prefixes(name: str) -> None:
    workload = MAKERS[name](Random(1))
    assert workload == MAKERS[name](Random(1))
    assert workload != MAKERS[name](Random(2))
    assert workload.name == name
    items = workload.items
    for number, item in enumerate(items):
        assert (item.after is None) == (item.position == 0)
        if item.after is not None:
            before = items[item.after]
            assert item.after < number
            assert (before.group, before.position) == (item.group, item.position - 1)
            assert item.shared_tokens > 0
            assert item.tokens[: item.shared_tokens] == before.tokens[: item.shared_tokens]


def test_conversation_holds_the_answers_that_the_model_will_give() -> None:
    items = workloads.multi_turn(Random(1), conversations=8, open_at_once=3).items
    followed = [(item, items[item.after]) for item in items if item.after is not None]
    assert followed
    for item, before in followed:
        start = len(before.tokens)
        answer = item.tokens[start : start + before.max_tokens]
        assert answer == tuple(answer_token(item.group, start + i) for i in range(before.max_tokens))


def test_trace_shares_the_blocks_of_equal_ids() -> None:
    lines = [
        json.dumps({"timestamp": 0, "input_length": 700, "output_length": 500, "hash_ids": [0, 1]}),
        json.dumps({"timestamp": 3, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]}),
    ]
    first, second = workloads.replay(lines).items
    assert (len(first.tokens), len(second.tokens)) == (700, 1024)
    assert first.tokens[:512] == second.tokens[:512]
    assert set(first.tokens[512:]).isdisjoint(second.tokens[512:])
    assert (first.max_tokens, second.max_tokens) == (32, 1)
    assert [item.group for item in workloads.replay(lines, one_in=2).items] == [1]
