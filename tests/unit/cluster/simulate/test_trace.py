"""Traces are read as they are, or refused with the line that is wrong."""

import json
from pathlib import Path
from random import Random

import pytest

from tidemill.cluster.simulate.trace import (
    BLOCK_TOKENS,
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


def test_items_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line(5000, 600, 7, [1, 2])}\n\n{line(2000, 1, 0, [3])}\n")
    assert read_trace(path) == [TraceRequest(0.0, 1, 1, (0,)), TraceRequest(3.0, 600, 7, (1, 2))]


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[1]",
        "{}",
        line(0, 0, 1, []),
        line(0, 5 * BLOCK_TOKENS, 1, [1]),
        line(0, 1, 1, [1])[:-2] + "'",
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line(0, 1, 1, [1])}\n{text}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2"):
        read_trace(path)


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_no_file_and_no_requests_are_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)


def test_spreading_moves_arrivals_inside_of_their_tick_alone() -> None:
    items = [TraceRequest(float(number // 10 * 3), 1, 1, (number,)) for number in range(100)]
    moved = {item.blocks: item.at_s for item in spread(items, Random(1))}
    for item in items:
        ahead = 3.0 if item.at_s < items[-1].at_s else 1e-9
        assert item.at_s <= moved[item.blocks] < item.at_s + ahead
    assert len(set(moved.values())) > 90
    assert [item.at_s for item in speed_up(items, 2.0)] == [item.at_s / 2 for item in items]


def test_what_could_be_reused_is_counted_in_full_blocks_below_the_last_token() -> None:
    full = TraceRequest(0.0, 3 * BLOCK_TOKENS, 1, (1, 2, 3))  # its last block holds the last token
    other = TraceRequest(0.0, 2 * BLOCK_TOKENS + 1, 1, (1, 9, 10))
    assert reusable_share([full]) == 0.0
    assert reusable_share([full, full]) == 2 / 6
    assert reusable_share([full, other]) == pytest.approx(BLOCK_TOKENS / (5 * BLOCK_TOKENS + 1))


def test_names_cover_what_is_before_them() -> None:
    items = [TraceRequest(0.0, 1200, 1, blocks) for blocks in ((1, 2, 3), (1, 2, 4), (9, 2, 3))]
    assert [item.blocks for item in chain_blocks(items)] == [(0, 1, 2), (0, 1, 3), (4, 5, 6)]
    assert chain_blocks(chain_blocks(items)) == chain_blocks(items)
