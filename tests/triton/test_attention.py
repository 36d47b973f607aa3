"""Paged attention in Triton: its definition over odd sizes, NaN in unused memory, equal bits."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import LIMITS, int32, relative_error, same_bits, step
from tests.support.kernels.paged import (
    CASES,
    SCALINGS,
    Case,
    Layer,
    check,
    check_any_batch,
    check_batches,
    check_codes,
    check_far,
    check_gate,
    check_large_scores,
    check_padding,
    check_sinks,
)
from tidemill.kernels.attention import cuda, lists
from tidemill.kernels.dispatch import operators
from tidemill.kernels.shared import tiles
from tidemill.kernels.shared.rows import Made

OURS = operators("triton", Path())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case, OURS)


@pytest.mark.parametrize("window", [None, 64, 65, 130, 192, 193, 400])
@pytest.mark.parametrize("length", [256, 257, 513])
def test_long_sequences_have_longer_spans(
    monkeypatch: pytest.MonkeyPatch, length: int, window: int | None
) -> None:
    """Spans have 64 tokens up to 256, 128 up to 512, 192 up to 768, two at a time; in windows up to 192 and
    384."""
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    monkeypatch.setattr(cuda, "SPANS_MAX", 4)
    monkeypatch.setattr(cuda, "SPANS_AT_ONCE", 2)
    check(
        Case(new=[1], before=[length - 1], heads=(1, 1), dim=32, window=window, sinks=window is not None),
        OURS,
    )


def test_rows_of_a_large_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(lists, "ENTRIES_AT_ONCE", 4)
    check(Case(new=[3, 1, 40, 2, 17], before=[1, 0, 60, 5, 0], heads=(1, 1), dim=32), OURS)


TAILS = Case(new=[4, 1, 64, 65, 2, 9], before=[700, 90, 500, 130, 3, 63], heads=(4, 2), dim=32)
"""Guesses, tails of up to 64 tokens and a longer one."""


@pytest.mark.parametrize(
    ("case", "limit", "value"),
    [
        (TAILS, "RESULTS_MAX", 1 << 20),
        (replace(TAILS, sinks=True), "RESULTS_MAX", 2048),
        # A short row of the longest text has programs for every span, and leaves none out.
        (Case(new=[3, 3], before=[250, 100], page_tokens=16, heads=(2, 1), dim=16), "SPANS_SHORT", 2),
        # One of two longer rows is behind a long text.
        (
            Case(new=[1, 70, 66, 3], before=[90, 400, 100, 500], heads=(4, 2), dim=32, sinks=True),
            "SPLIT_KEYS",
            400,
        ),
    ],
)
def test_rows_of_several_tokens_split_their_keys(
    monkeypatch: pytest.MonkeyPatch, case: Case, limit: str, value: int
) -> None:
    """Rows after a long text, whose keys are split: the definition, the same bits alone, and a gate."""
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    monkeypatch.setattr(cuda, limit, value)
    layer = Layer(case)
    together = layer.run(OURS)
    assert relative_error(together, layer.wanted()) < LIMITS[case.dtype]
    check_batches(layer, OURS, together, [[b] for b in range(len(case.new))])
    check_gate(layer, OURS)


@pytest.mark.parametrize("name", ["mixed", "extend, pages of 128", "latents, mixed"])
def test_smaller_tiles_match_the_definition(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are those of GPUs with less shared memory, which have no copy engine."""
    monkeypatch.setattr(tiles, "shared_bytes", lambda: 99 << 10)
    check(CASES[name], OURS)


@pytest.mark.parametrize("split_keys", [1 << 14, 196, 195])
def test_no_entry_of_a_list_is_empty(split_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens see 704 keys, in spans of 256; 65 tokens of two query heads are two tiles; and so on."""
    monkeypatch.setattr(cuda, "SPLIT_KEYS", split_keys)
    made: Made = {}
    layer = Layer(TAILS)
    OURS.attention(layer.q_THD, layer.cache, layer.rows, None, None, made)
    (lists_KN,) = made.values()
    found = [
        [(entry >> 32, entry & 0xFFFFFFFF) for entry in of_K[1 : 1 + of_K[0]]] for of_K in lists_KN.tolist()
    ]
    parts = {
        lists.SINGLES: [(1, 1)],
        lists.SHORT: [(0, 3), (2, 3), (4, 1), (5, 1)],
        lists.ADDED: [(0, 1), (2, 8), (4, 1), (5, 2)],
        lists.LONG: [(3, 2)] if split_keys > 195 else [],
    }
    if split_keys < 1 << 14:
        parts[lists.SPLIT] = [(3, 2)] if split_keys == 195 else []
        parts[lists.SPLIT_ADDED] = [(3, 9)] if split_keys == 195 else []
    assert len(found) == len(parts)
    for kind, of_rows in parts.items():
        every = [(row, part) for row, count in of_rows for part in range(count)]
        assert found[kind] == every[::-1]


@pytest.mark.parametrize("programs", [1, 3])
def test_bits_do_not_depend_on_the_number_of_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    layer = Layer(replace(TAILS, new=[4, 1, 20, 65, 2], before=[200, 190, 0, 63, 3]))
    wanted = layer.run(OURS)
    monkeypatch.setattr(lists, "PROGRAMS", programs)
    assert same_bits(layer.run(OURS), wanted)


@pytest.mark.parametrize("window", [None, 50, 280])
def test_same_bits_in_any_batch(window: int | None) -> None:
    check_any_batch(OURS, (2, 1), 32, window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 5, 4]], ids=["decode", "mixed"])
def test_padding_gives_zeros_and_changes_no_row(new: list[int], window: int | None) -> None:
    case = Case(new=new, before=[70, 0, 64], heads=(2, 1), dim=32, window=window, sinks=bool(window))
    check_padding(case, OURS)


def test_row_of_no_tokens_is_left_out() -> None:
    layer = Layer(Case(new=[1, 5, 4], before=[70, 0, 64], heads=(2, 1), dim=32))
    assert len(layer.run(OURS, step([0], [3]), slice(0))) == 0
    wanted = layer.run(OURS)
    layer.rows.cu_B1.copy_(int32([0, 1, 1, 5]))
    assert same_bits(layer.run(OURS, picked=torch.tensor([0, 6, 7, 8, 9])), wanted[[0, 6, 7, 8, 9]])


def test_strided_queries() -> None:
    layer = Layer(Case(new=[1, 20], before=[70, 3], heads=(2, 1), dim=32))
    wanted = layer.run(OURS)
    layer.q_THD = torch.cat([layer.q_THD, layer.q_THD], dim=2)[..., :32]
    assert same_bits(layer.run(OURS), wanted)


@pytest.mark.parametrize("page_tokens", [16, 64], ids=["pointers", "descriptor"])
def test_pages_far_into_the_arena(tmp_path: Path, page_tokens: int) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""

    def sparse(size: int) -> torch.Tensor:
        return torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=torch.bfloat16)

    case = Case(new=[1, 20], before=[40, 30], page_tokens=page_tokens, heads=(2, 1), dim=32)
    check_far(case, OURS, 1 << 32, sparse)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("new", [[1, 1], [1, 70]], ids=["decode", "mixed"])
def test_sink_of_no_weight_is_none_and_one_of_all_weight_leaves_nothing(
    new: list[int], window: int | None
) -> None:
    check_sinks(Case(new=new, before=[300, 30], heads=(4, 2), dim=32, window=window), OURS)


def test_large_scores_do_not_overflow() -> None:
    case = Case(new=[1, 20], before=[40, 30], heads=(1, 1), dtype=torch.float32, dim=16)
    check_large_scores(case, OURS)


CODED = {
    name: replace(CASES[name], dtype=torch.bfloat16, cache_dtype=None)
    for name in (
        "decode",
        "decode, odd",
        "mixed, sinks",
        "extend, pages of 16",
        "latents, mixed",
        "latents, decode",
        "mixed, window of 65",
        "mixed, pages of 16, window of 65",
    )
} | {"tails": TAILS}
CODED["decode, odd"] = replace(CODED["decode, odd"], page_tokens=12)
CODED["extend, pages of 16"] = replace(CODED["extend, pages of 16"], heads=(1, 1))
CODED["mixed, sinks"] = replace(CODED["mixed, sinks"], heads=(2, 1))


@SCALINGS
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_attention_over_codes_has_the_bits_of_their_numbers(case: Case, *, fixed: bool) -> None:
    check_codes(case, OURS, fixed=fixed)


@pytest.mark.parametrize("gib", [0.001, 1, 2, 3, 4, 6, 8, 12, 40, 128])
def test_no_large_arena_is_taken_for_a_small_tensor(gib: float) -> None:
    """The sum is that of `driver.c` of Triton 3.7, in an int."""
    page_bytes, last_bytes = 12 * (128 << 10), (128 << 10) - 2  # twelve layers, of two heads of 256
    for more in range(40):
        pages = int(gib * (1 << 30)) // page_bytes + 1 + 71 * more
        found = cuda.described(pages, page_bytes, last_bytes)
        assert pages <= found <= pages + (1 << 31) // page_bytes + 1
        if (pages - 1) * page_bytes + last_bytes >= 128 << 10:
            assert ctypes.c_int32((found - 1) * page_bytes + last_bytes).value + 1 >= 128 << 10
    assert cuda.described(1, page_bytes, last_bytes) == 1
