"""Traces are read and transformed, or refused with the wrong line."""

import json
from pathlib import Path
from random import Random

import pytest

from tidemill.cluster.simulate.trace import (
    BLOCK_TOKENS,
    Hints,
    TraceError,
    TraceRequest,
    chain_blocks,
    read_trace,
    reusable_share,
    speed_up,
    spread,
)


def line(at_ms: float, prompt: int, answer: int, blocks: list[int]) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": prompt, "output_length": answer, "hash_ids": blocks}
    )


def test_read_trace_sorts_requests_from_time_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line(5000, 600, 7, [1, 2])}\n\n{line(2000, 1, 0, [3])}\n")
    assert read_trace(path) == [TraceRequest(0.0, 1, 1, (0,)), TraceRequest(3.0, 600, 7, (1, 2))]


def test_read_trace_keeps_hints(tmp_path: Path) -> None:
    hints = {"breakpoints": [512, 64], "session": "a", "retain_s": 60}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**json.loads(line(0, 600, 7, [1, 2])), **hints}))
    assert read_trace(path)[0].hints == Hints((64, 512), "a", 60.0)


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
    path.write_text(f"{line(0, 1, 1, [1])}\n{text}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2"):
        read_trace(path)


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_read_trace_refuses_a_missing_or_empty_file(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
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
