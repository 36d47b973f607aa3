"""`rope_store` and `attention` over shuffled, NaN-poisoned pages: definitions, odd sizes, and equal bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import COMPUTE_DTYPES, LIMITS, relative_error, same_bits, step
from tests.support.kernels.paged import (
    CASES,
    SCALINGS,
    STORES,
    Case,
    Layer,
    Storing,
    check,
    check_batches,
    check_codes,
    check_far,
    check_large_scores,
    check_padding,
    check_sinks,
    check_store,
    check_store_far,
    check_stored_codes,
)
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.fp8 import BIAS, CODE_MAX, decode, scale_of

Shape = dict[str, Any]

SHAPES: tuple[Shape, ...] = (
    {"heads": (1, 1), "dim": 1, "rotary": 0},
    {"heads": (4, 2), "dim": 16, "rotary": 4},
    {"heads": (6, 2), "dim": 63, "rotary": 20},
    {"heads": (5, 1), "dim": 65, "rotary": 64},
    {"heads": (2, 2), "dim": 256, "rotary": 64},
    {"heads": (3, 1), "dim": 32, "rotary": 0, "normed": False},
    {"heads": (4, 2), "dim": 24, "rotary": 24, "normed": False},
    {"heads": (7, 1), "dim": 72, "rotary": 8, "normed": False, "latent": True},
)
IN_PAGES = SHAPES[5]  # whose keys and values are read where they lie, in bfloat16, for few queries
SEVEN_IN_PAGES: Shape = {"heads": (7, 1), "dim": 96, "rotary": 0, "normed": False}
FIRST, SECOND = [65, 1, 127, 2, 64], [1, 1, 40, 63, 1]
WINDOWS = (1, 63, 64, 65, 128, 500)


def on_cpu(case: Case) -> Case:
    """Return the case with float32 queries."""
    return replace(case, dtype=torch.float32, cache_dtype=case.page_dtype)


@pytest.fixture(scope="module", params=COMPUTE_DTYPES)
def compute_dtype(request: pytest.FixtureRequest) -> ComputeDtype:
    return request.param


@pytest.fixture(scope="module")
def cpu(kernel_cache: Path, compute_dtype: ComputeDtype) -> Operators:
    return operators("cpu", kernel_cache, compute_dtype)


@pytest.fixture(scope="module")
def reference(kernel_cache: Path, compute_dtype: ComputeDtype) -> Operators:
    return operators("reference", kernel_cache, compute_dtype)


@pytest.mark.parametrize("case", [*map(on_cpu, CASES.values())], ids=CASES)
def test_matches_the_definition(cpu: Operators, reference: Operators, case: Case) -> None:
    check(case, cpu, reference=reference)


@pytest.mark.parametrize("case", [*map(on_cpu, STORES.values())], ids=STORES)
def test_stored_pages_match_the_definition(cpu: Operators, case: Case) -> None:
    check_store(case, cpu)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("cache_dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        *({**SHAPES[2], "window": window, "sinks": sinks} for window in WINDOWS for sinks in (False, True)),
    ],
    ids=str,
)
def test_odd_shapes_match_the_definition(
    cpu: Operators, reference: Operators, shape: Shape, cache_dtype: torch.dtype, page_tokens: int
) -> None:
    """A prefill of mixed lengths; then decode, replay and a new sequence in one batch."""
    for new, before in ((FIRST, [0] * 5), (SECOND, FIRST)):
        case = Case(
            new=new,
            before=before,
            page_tokens=page_tokens,
            dtype=torch.float32,
            cache_dtype=cache_dtype,
            **shape,
        )
        check(case, cpu, reference=reference)
        check_store(case, cpu)


@settings(max_examples=30, deadline=None)
@given(
    ends=st.sets(st.integers(1, 299), max_size=8),
    length=st.integers(1, 300),
    page_tokens=st.sampled_from([1, 16, 64]),
    cache_dtype=st.sampled_from(list(LIMITS)),
    shape=st.sampled_from([SHAPES[1], SHAPES[2], IN_PAGES, SEVEN_IN_PAGES, SHAPES[-1]]),
    window=st.none() | st.integers(1, 310),
    sinks=st.booleans(),
)
def test_same_bits_however_a_sequence_is_cut(
    cpu: Operators,
    reference: Operators,
    *,
    ends: set[int],
    length: int,
    shape: Shape,
    **fields: Any,  # noqa: ANN401
) -> None:
    """The last step has one token, after a text of any length; the whole is that of the definition."""
    case = Case(new=[length], before=[0], dtype=torch.float32, **shape, **fields)
    layer, whole, cut = Layer(case), Storing(case), Storing(case)
    wanted, turned = layer.run(cpu), whole.run(cpu)
    start = 0
    for end in [*sorted(end for end in {*ends, length - 1} if 0 < end < length), length]:
        picked, rows = slice(start, end), layer.step([end - start], [start])
        assert same_bits(layer.run(cpu, rows, picked), wanted[picked])
        assert same_bits(cut.run(cpu, step([end - start], [start], cut.pages), picked), turned[picked])
        start = end
    assert same_bits(cut.arena, whole.arena)
    assert relative_error(wanted, layer.wanted(reference)) < layer.limit(reference)


@pytest.mark.parametrize(
    ("shape", "cache_dtype"), [(SHAPES[1], torch.float32), (IN_PAGES, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("window", [None, 70])
def test_same_bits_in_any_batch_and_with_any_threads(
    cpu: Operators, window: int | None, shape: Shape, cache_dtype: torch.dtype
) -> None:
    case = Case(
        new=[150, 1, 64, 90], before=[0] * 4, page_tokens=16, dtype=torch.float32, cache_dtype=cache_dtype,
        window=window, sinks=window is not None, **shape,
    )  # fmt: skip
    layer, stored = Layer(case), Storing(case)
    torch.set_num_threads(2)
    together, turned = layer.run(cpu), stored.run(cpu)
    pages = stored.arena.clone()
    torch.set_num_threads(1)
    check_batches(layer, cpu, together, ([3, 0], [2], [1, 2, 3, 0], [0]))
    assert same_bits(stored.run(cpu), turned)
    assert same_bits(stored.arena, pages)


@pytest.mark.parametrize("window", [None, 20])
def test_sink_of_no_weight_is_none_and_one_of_all_weight_leaves_nothing(
    cpu: Operators, window: int | None
) -> None:
    check_sinks(
        Case(new=[100], before=[0], page_tokens=16, dtype=torch.float32, window=window, **SHAPES[1]), cpu
    )


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_padding_gives_zeros(cpu: Operators, reference: Operators, *, sinks: bool) -> None:
    case = Case(
        new=[3, 6, 2],
        before=[0, 1, 20],
        page_tokens=16,
        dtype=torch.float32,
        window=4,
        sinks=sinks,
        **SHAPES[1],
    )
    for ops in (cpu, reference):
        check_padding(case, ops)


def test_results_that_vanish_have_one_sign(cpu: Operators) -> None:
    """Token 64 outweighs token 0, of which -0 is left, and has the value -0; 65 is beside it or not."""
    cache = torch.zeros(1, 1, 2, 128, 1)
    cache[0, 0, 0, 64], cache[0, 0, 1, 0] = 85.0, -1e-20
    cache[0, 0, 1, 64:66] = torch.tensor([[-0.0], [1.0]])
    pages = torch.zeros(1, 1, dtype=torch.int32)
    both = cpu.attention(torch.ones(2, 1, 1), cache, step([2], [64], pages), None, None)
    alone = cpu.attention(torch.ones(1, 1, 1), cache, step([1], [64], pages), None, None)
    assert same_bits(both[:1], alone)


@pytest.mark.parametrize("distance", [1 << 29, 1 << 31], ids=["2^31 bytes", "2^31 elements"])
def test_pages_far_into_the_arena(cpu: Operators, tmp_path: Path, distance: int) -> None:
    """Offsets that do not fit 32 bits, in a file that has blocks only where it is written."""

    def sparse(size: int) -> torch.Tensor:
        return torch.from_file(str(tmp_path / "arena"), shared=True, size=size)

    case = Case(new=[40, 1], before=[0, 17], page_tokens=16, dtype=torch.float32, **SHAPES[1])
    check_store_far(case, cpu, distance, sparse)
    check_far(case, cpu, distance, sparse)


def test_large_scores_do_not_overflow(cpu: Operators, reference: Operators) -> None:
    case = Case(new=[3], before=[100], page_tokens=16, dtype=torch.float32, **SHAPES[1])
    check_large_scores(case, cpu, reference)


def test_bfloat16_pages_round_to_the_nearest_even(cpu: Operators) -> None:
    layer = Storing(
        Case(
            new=[64], before=[0], page_tokens=16, dtype=torch.float32, cache_dtype=torch.bfloat16, **SHAPES[1]
        )
    )
    assert layer.v_TKD is not None
    layer.v_TKD[:3, 0, 0] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])  # half way
    layer.v_TKD[3:6, 0, 0] = torch.tensor([torch.inf, -torch.inf, 3e38])
    layer.run(cpu)
    stored_TKD = layer.arena[layer.pages[0].long(), :, 1, 1].transpose(1, 2).reshape(layer.v_TKD.shape)
    assert same_bits(stored_TKD, layer.v_TKD.bfloat16())


def test_each_code_is_a_number_that_bfloat16_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8).expand(3, -1)
    numbers = decode(codes, torch.tensor([16, BIAS, 246], dtype=torch.uint8))
    assert torch.equal(numbers.isnan(), codes % 128 == 127)
    assert same_bits(numbers.bfloat16().float().nan_to_num(), numbers.nan_to_num())
    assert numbers.nan_to_num().abs().max() < torch.inf


@pytest.mark.parametrize("scale", [0, 1e-38, 1e-30, 0.3, 1.0, 448.0, 449.0, 1e5, 1e37, 3e38])
def test_scale_is_the_least_that_has_no_code_beyond_the_largest(scale: float) -> None:
    highest = torch.tensor([scale], dtype=torch.float32)
    byte = scale_of(highest)
    largest = decode(torch.tensor([[0x7E]], dtype=torch.uint8), byte)
    below = CODE_MAX * 2.0 ** (int(byte) - 1 - BIAS)
    assert largest >= highest or int(byte) == 246
    assert below < scale or int(byte) == 16


CODED: dict[str, Any] = {"new": [40, 1, 3, 1, 130], "before": [0, 300, 257, 0, 20], "page_tokens": 16}


@SCALINGS
@pytest.mark.parametrize(
    "shape",
    [{"heads": (2, 2), "dim": 64}, {"heads": (1, 1), "dim": 63}, {"heads": (3, 3), "dim": 5}, SHAPES[-1]],
    ids=str,
)
def test_stored_codes_are_those_of_the_definition(cpu: Operators, shape: Shape, *, fixed: bool) -> None:
    case = Case(**CODED, dtype=torch.float32, **dict[str, Any](shape, rotary=0, normed=False))
    check_stored_codes(case, cpu, fixed=fixed)


@SCALINGS
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (4, 1), "dim": 64},
        {"heads": (7, 1), "dim": 96, "window": 33, "sinks": True},
        {"heads": (6, 2), "dim": 63, "window": 40},
        {"heads": (4, 2), "dim": 128, "sinks": True},
        {"heads": (5, 1), "dim": 72, "latent": True},
    ],
    ids=str,
)
def test_attention_over_codes_has_the_bits_of_their_numbers(
    cpu: Operators, reference: Operators, shape: Shape, *, fixed: bool
) -> None:
    """Decode, replay, prompts and the end of one."""
    case = Case(**CODED, dtype=torch.float32, cache_dtype=torch.bfloat16, **shape)
    check_codes(case, cpu, fixed=fixed, reference=reference)
