"""Traces are read and transformed, or refused with the wrong line; that of agents follows its study."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import pytest

from tidemill.cluster.simulate.agents import FAMILIES, SYSTEM_BLOCKS, TURNS, agents_trace
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import (
    BLOCK_TOKENS,
    Hints,
    TraceError,
    TraceRequest,
    by_client,
    chain_blocks,
    read_trace,
    reusable_share,
    speed_up,
    spread,
)
from tidemill.cluster.simulate.world import simulate


def line(at_ms: float, prompt: int, answer: int, blocks: list[int]) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": prompt, "output_length": answer, "hash_ids": blocks}
    )


def test_read_trace_sorts_requests_from_time_zero_and_keeps_hints(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    hinted = {
        **json.loads(line(5000, 600, 7, [1, 2])),
        "breakpoints": [512, 64],
        "session": "a",
        "retain_s": 60,
    }
    path.write_text(f"{json.dumps(hinted)}\n\n{line(2000, 1, 0, [3])}\n")
    hints = Hints((64, 512), "a", 60.0)
    assert read_trace(path) == [TraceRequest(0.0, 1, 1, (0,)), TraceRequest(3.0, 600, 7, (1, 2), hints)]


def hinted(**hints: object) -> str:
    return json.dumps({**json.loads(line(0, 1, 1, [1])), **hints})


@pytest.mark.parametrize(
    "text",
    [
        hinted(breakpoints=[0]),
        hinted(breakpoints=5),
        hinted(session=5),
        hinted(retain_s=-1),
        hinted(retain_s=1e9),
        "no json",
        "[1]",
        "{}",
        line(0, 0, 1, []),
        line(0, 5 * BLOCK_TOKENS, 1, [1]),
        line(0, 1, 1, [1])[:-2] + "'",
    ],
)
def test_read_trace_names_the_malformed_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)
    path.write_text("\n\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)
    path.write_text(f"{line(0, 1, 1, [1])}\n{text}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2"):
        read_trace(path)


def test_spread_moves_arrivals_only_within_their_tick() -> None:
    requests = [TraceRequest(float(number // 10 * 3), 1, 1, (number,)) for number in range(100)]
    moved = {request.blocks: request.at_s for request in spread(requests, Random(1))}
    for request in requests:
        tick_s = 3.0 if request.at_s < requests[-1].at_s else 1e-9
        assert request.at_s <= moved[request.blocks] < request.at_s + tick_s
    assert len(set(moved.values())) > 90
    assert [request.at_s for request in speed_up(requests, 2.0)] == [request.at_s / 2 for request in requests]


def test_reusable_share_counts_full_blocks_below_the_last_token() -> None:
    full = TraceRequest(0.0, 3 * BLOCK_TOKENS, 1, (1, 2, 3))  # its last block holds the last token
    other = TraceRequest(0.0, 2 * BLOCK_TOKENS + 1, 1, (1, 9, 10))
    assert reusable_share([full]) == 0.0
    assert reusable_share([full, full]) == 2 / 6
    assert reusable_share([full, other]) == pytest.approx(BLOCK_TOKENS / (5 * BLOCK_TOKENS + 1))


def test_chain_blocks_makes_names_cover_all_blocks_before_them() -> None:
    requests = [TraceRequest(0.0, 1200, 1, blocks) for blocks in ((1, 2, 3), (1, 2, 4), (9, 2, 3))]
    assert [request.blocks for request in chain_blocks(requests)] == [(0, 1, 2), (0, 1, 3), (4, 5, 6)]
    assert chain_blocks(chain_blocks(requests)) == chain_blocks(requests)


def sessions_of(requests: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.hints.session, []).append(request)
    return sessions


def test_lengths_and_reuse_are_those_of_the_study() -> None:
    requests = agents_trace(16, 2, Random(1))
    assert requests == sorted(requests, key=lambda request: request.at_s)
    assert median(request.prompt_tokens for request in requests) == pytest.approx(142_000, rel=0.15)
    assert median(request.answer_tokens for request in requests) == pytest.approx(444, rel=0.15)
    assert median(map(len, sessions_of(requests).values())) == pytest.approx(TURNS, rel=0.15)
    assert reusable_share(requests) > 0.94
    assert requests == agents_trace(16, 2, Random(1)) != agents_trace(16, 2, Random(2))


def test_a_turn_repeats_the_prompt_before_it_and_families_share_their_start() -> None:
    sessions = sessions_of(agents_trace(8, 2, Random(1)))
    assert len(sessions) == 16
    assert 1 < len({turns[0].blocks[:SYSTEM_BLOCKS] for turns in sessions.values()}) <= FAMILIES
    for turns in sessions.values():
        for earlier, later in pairwise(turns):
            full = earlier.prompt_tokens // BLOCK_TOKENS
            assert later.blocks[:full] == earlier.blocks[:full]
            assert later.at_s > earlier.at_s


def test_an_agent_waits_for_its_answer_before_it_asks_again() -> None:
    requests = agents_trace(2, 1, Random(1))[:12]
    outcome = simulate(requests, Setup(prefill=0, decode=0, mixed=1, hybrid=True, blocks=600))
    served = {answered.prompt_tokens: answered for answered in outcome.served}
    for chain in by_client(requests):
        for (_, earlier), (_, later) in pairwise(chain):
            before, after = served[earlier.prompt_tokens], served[later.prompt_tokens]
            assert after.at_s > before.at_s + before.ttft_s + later.pause_s
