"""`rope_store` and `attention` over shuffled, NaN-poisoned pages: definitions, odd sizes, and equal bits.

Page 0 is unused: the entries of pages that left the window name it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import (
    COMPUTE_DTYPES,
    LIMITS,
    random,
    relative_error,
    same_bits,
    shuffled_pages,
    step,
)
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.rows import Rows

EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    dim: int
    rotary: int
    normed: bool = True
    latent: bool = False


SHAPES = (
    Shape(q_heads=1, kv_heads=1, dim=1, rotary=0),
    Shape(q_heads=4, kv_heads=2, dim=16, rotary=4),
    Shape(q_heads=6, kv_heads=2, dim=63, rotary=20),
    Shape(q_heads=5, kv_heads=1, dim=65, rotary=64),
    Shape(q_heads=2, kv_heads=2, dim=256, rotary=64),
    Shape(q_heads=3, kv_heads=1, dim=32, rotary=0, normed=False),
    Shape(q_heads=4, kv_heads=2, dim=24, rotary=24, normed=False),
    Shape(q_heads=7, kv_heads=1, dim=72, rotary=8, normed=False, latent=True),
)
IN_PAGES = SHAPES[5]  # whose keys and values are read where they lie, in bfloat16, for few queries
SEVEN_IN_PAGES = Shape(q_heads=7, kv_heads=1, dim=96, rotary=0, normed=False)
LATENT = SHAPES[-1]
FIRST, SECOND = [65, 1, 127, 2, 64], [1, 1, 40, 63, 1]
LENS = [first + second for first, second in zip(FIRST, SECOND, strict=True)]
WINDOWS = (1, 63, 64, 65, 128, 500)


@pytest.fixture(scope="module", params=COMPUTE_DTYPES)
def compute_dtype(request: pytest.FixtureRequest) -> ComputeDtype:
    return request.param


@pytest.fixture(scope="module")
def cpu(kernel_cache: Path, compute_dtype: ComputeDtype) -> Operators:
    return operators("cpu", kernel_cache, compute_dtype)


@pytest.fixture(scope="module")
def reference(kernel_cache: Path, compute_dtype: ComputeDtype) -> Operators:
    return operators("reference", kernel_cache, compute_dtype)


@pytest.fixture(scope="module")
def limit(compute_dtype: ComputeDtype) -> float:
    """The limit of attention's relative error. The softmax is rounded before or after its division."""
    return 1e-5 if compute_dtype == "float32" else 1e-2


class Layer:
    """One layer of a two-layer arena of NaN, the q, k, v of its tokens, and what these see."""

    def __init__(self, shape: Shape, tokens: int, pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        s = shape
        draw = torch.Generator().manual_seed(tokens)
        self.q_THD = random(draw, tokens, s.q_heads, 2 * s.dim)[..., : s.dim]
        kv_T2KD = random(draw, tokens, 2, s.kv_heads, s.dim)
        self.k_TKD, self.v_TKD = kv_T2KD[:, 0], None if s.latent else kv_T2KD[:, 1]
        weights = random(draw, s.dim), random(draw, s.dim)
        self.weights = weights if s.normed else (None, None)
        self.angles_T2R = random(draw, tokens, 2, s.rotary // 2)
        halves = 1 if s.latent else 2
        self.arena = torch.full((pages, s.kv_heads, 2, halves, page_tokens, s.dim), torch.nan, dtype=dtype)
        self.cache = self.arena[:, :, 1]
        self.window: int | None = None
        self.sinks_H: torch.Tensor | None = None

    def see(self, window: int | None, *, sinks: bool) -> "Layer":
        self.window = window
        heads = self.q_THD.shape[1]
        self.sinks_H = 3 * random(torch.Generator().manual_seed(heads), heads) if sinks else None
        return self

    def store(
        self, ops: Operators, cache: torch.Tensor, rows: Rows, picked: slice | torch.Tensor
    ) -> torch.Tensor:
        dtype = torch.float32 if ops.attention.__module__.endswith("cpu") else torch.float64
        q, k, angles = (x[picked].to(dtype) for x in (self.q_THD, self.k_TKD, self.angles_T2R))
        v = None if self.v_TKD is None else self.v_TKD[picked].to(dtype)
        q_weight, k_weight = (None if weight is None else weight.to(dtype) for weight in self.weights)
        return ops.rope_store(q, k, v, q_weight, k_weight, EPSILON, angles, cache, rows)

    def attend(self, ops: Operators, q_THD: torch.Tensor, cache: torch.Tensor, rows: Rows) -> torch.Tensor:
        return ops.attention(q_THD, cache, rows, self.window, self.sinks_H)

    def run(self, ops: Operators, rows: Rows, picked: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        return self.attend(ops, self.store(ops, self.cache, rows, picked), self.cache, rows)


def released(
    pages: torch.Tensor, before: Sequence[int], window: int | None, page_tokens: int
) -> torch.Tensor:
    """The table without the pages of which no token from the `before`-th of its row on sees any."""
    pages = pages.clone()
    for pages_N, old in zip(pages, before, strict=True):
        pages_N[: 0 if window is None else max(0, old - window + 1) // page_tokens] = 0
    return pages


def check(cpu: Operators, reference: Operators, layer: Layer, pages: torch.Tensor, limit: float) -> None:
    """A prefill of mixed lengths, then a second step: decode, replay and a new sequence in one batch."""
    truth = layer.arena.clone()[:, :, 1]
    for new, before, picked in (
        (FIRST, [0] * 5, slice(0, sum(FIRST))),
        (SECOND, FIRST, slice(sum(FIRST), None)),
    ):
        rows = step(new, before, released(pages, before, layer.window, layer.cache.shape[3]))
        wanted_q = layer.store(reference, truth, rows, picked)
        wanted = layer.attend(reference, wanted_q, truth, rows)
        q = layer.store(cpu, layer.cache, rows, picked)
        assert relative_error(q, wanted_q) < 1e-5
        error = relative_error(layer.attend(cpu, q, layer.cache, rows), wanted)
        assert error < max(LIMITS[layer.cache.dtype], limit)
    assert torch.equal(layer.cache.isnan(), truth.isnan())
    assert relative_error(layer.cache.nan_to_num(), truth.nan_to_num()) < LIMITS[layer.cache.dtype]
    assert bool(layer.arena[:, :, 0].isnan().all()), "the neighbouring layer was written"


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize(
    ("shape", "dtype", "window", "sinks"),
    [
        *((shape, dtype, None, False) for shape in SHAPES for dtype in LIMITS),
        *((SHAPES[2], torch.float32, window, sinks) for window in WINDOWS for sinks in (False, True)),
    ],
    ids=str,
)
def test_matches_the_definition(
    cpu: Operators,
    reference: Operators,
    *,
    shape: Shape,
    dtype: torch.dtype,
    window: int | None,
    sinks: bool,
    page_tokens: int,
    limit: float,
) -> None:
    pages = shuffled_pages(LENS, page_tokens, torch.Generator().manual_seed(7))
    layer = Layer(shape, sum(LENS), 1 + int(pages.max()), page_tokens, dtype)
    check(cpu, reference, layer.see(window, sinks=sinks), pages, limit)


@settings(max_examples=30, deadline=None)
@given(
    ends=st.sets(st.integers(1, 299), max_size=8),
    length=st.integers(1, 300),
    page_tokens=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(list(LIMITS)),
    shape=st.sampled_from([SHAPES[1], SHAPES[2], IN_PAGES, SEVEN_IN_PAGES, LATENT]),
    window=st.none() | st.integers(1, 310),
    sinks=st.booleans(),
)
def test_same_bits_however_a_sequence_is_cut(
    cpu: Operators,
    reference: Operators,
    *,
    ends: set[int],
    length: int,
    page_tokens: int,
    dtype: torch.dtype,
    shape: Shape,
    window: int | None,
    sinks: bool,
    limit: float,
) -> None:
    """The last step has one token, after a text of any length; the whole is that of the definition."""
    pages = shuffled_pages([length], page_tokens, torch.Generator().manual_seed(1))
    whole, cut = (
        Layer(shape, length, 1 + int(pages.max()), page_tokens, dtype).see(window, sinks=sinks)
        for _ in range(2)
    )
    rows = step([length], [0], pages)
    wanted = whole.run(cpu, rows)
    start = 0
    found: list[torch.Tensor] = []
    for end in [*sorted(end for end in {*ends, length - 1} if 0 < end < length), length]:
        table = released(pages, [start], window, page_tokens)
        found.append(cut.run(cpu, step([end - start], [start], table), slice(start, end)))
        start = end
    assert same_bits(torch.cat(found), wanted)
    assert same_bits(cut.cache, whole.cache)
    truth = torch.full_like(whole.cache, torch.nan)
    exact = whole.attend(reference, whole.store(reference, truth, rows, slice(None)), truth, rows)
    assert relative_error(wanted, exact) < max(limit, LIMITS[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPES[1], torch.float32), (IN_PAGES, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("window", [None, 70])
def test_same_bits_in_any_batch_and_with_any_threads(
    cpu: Operators, window: int | None, shape: Shape, dtype: torch.dtype
) -> None:
    lens = [150, 1, 64, 90]
    pages = shuffled_pages(lens, 16, torch.Generator().manual_seed(2))
    layer = Layer(shape, sum(lens), 1 + int(pages.max()), 16, dtype)
    layer.see(window, sinks=window is not None)
    torch.set_num_threads(2)
    together = layer.run(cpu, step(lens, None, pages))
    torch.set_num_threads(1)
    for order in ([3, 0], [2], [1, 2, 3, 0], [0]):
        parts = [torch.arange(sum(lens[:b]), sum(lens[: b + 1])) for b in order]
        picked = torch.cat(parts)
        found = layer.run(cpu, step([lens[b] for b in order], None, pages[order]), picked)
        assert same_bits(found, together[picked])


@pytest.mark.parametrize("window", [None, 20])
def test_sink_of_no_weight_is_none_and_one_of_all_weight_leaves_nothing(
    cpu: Operators, window: int | None
) -> None:
    layer = Layer(SHAPES[1], 100, 8, 16, torch.float32).see(window, sinks=False)
    rows = step([100], [0], torch.arange(1, 8, dtype=torch.int32)[None])
    wanted = layer.run(cpu, rows)
    layer.sinks_H = torch.tensor([-torch.inf, 1e6, -1e6, 0])
    found = layer.run(cpu, rows)
    assert same_bits(found[:, [0, 2]], wanted[:, [0, 2]])
    assert bool((found[:, 1].abs() < 1e-30).all())
    assert bool((found[:, 3].abs() < wanted[:, 3].abs()).all())


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_padding_gives_zeros(cpu: Operators, reference: Operators, *, sinks: bool) -> None:
    layer = Layer(SHAPES[1], 9, 2, 16, torch.float32).see(4, sinks=sinks)
    rows = step([3, 6], [0, -6], torch.tensor([[1], [0]], dtype=torch.int32))
    layer.cache[1] = 1.0
    for ops in (cpu, reference):
        found = layer.attend(ops, layer.q_THD.contiguous(), layer.cache, rows)
        assert bool((found[:3] != 0).all())
        assert bool((found[3:] == 0).all())


def test_results_that_vanish_have_one_sign(cpu: Operators) -> None:
    """Token 64 outweighs token 0, of which -0 is left, and has the value -0; 65 is beside it or not."""
    cache = torch.zeros(1, 1, 2, 128, 1)
    cache[0, 0, 0, 64], cache[0, 0, 1, 0] = 85.0, -1e-20
    cache[0, 0, 1, 64:66] = torch.tensor([[-0.0], [1.0]])
    pages = torch.zeros(1, 1, dtype=torch.int32)
    both = cpu.attention(torch.ones(2, 1, 1), cache, step([2], [64], pages), None, None)
    alone = cpu.attention(torch.ones(1, 1, 1), cache, step([1], [64], pages), None, None)
    assert same_bits(both[:1], alone)


@pytest.mark.parametrize("offset_bytes", [1 << 31, 1 << 33], ids=["2^31 bytes", "2^31 elements"])
def test_pages_far_into_the_arena(cpu: Operators, tmp_path: Path, offset_bytes: int) -> None:
    """Offsets that do not fit 32 bits, in a file that has blocks only where it is written."""
    layer = Layer(SHAPES[1], 40, 4, 16, torch.float32)
    near = layer.arena
    skipped = -(-offset_bytes // (near[0].numel() * 4))
    size = (skipped + 4) * near[0].numel()
    far = torch.from_file(str(tmp_path / "arena"), shared=True, size=size).view(-1, *near.shape[1:])
    pages = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    wanted = layer.run(cpu, step([40], [0], pages))
    layer.cache = far[:, :, 1]
    found = layer.run(cpu, step([40], [0], pages + skipped))
    assert same_bits(found, wanted)
    assert same_bits(far[skipped + 2, :, 1], near[2, :, 1])


def test_large_scores_do_not_overflow(cpu: Operators, reference: Operators, limit: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q, cache = 100 * random(draw, 3, 4, 16), 10 * random(draw, 10, 2, 2, 16, 16)
    rows = step([3], [100], torch.arange(7, dtype=torch.int32)[None])
    wanted = reference.attention(q.double(), cache.double(), rows, None, None)
    assert relative_error(cpu.attention(q, cache, rows, None, None), wanted) < 10 * limit


def test_bfloat16_pages_round_to_the_nearest_even(cpu: Operators) -> None:
    layer = Layer(SHAPES[1], 64, 4, 16, torch.bfloat16)
    assert layer.v_TKD is not None
    layer.v_TKD[:3, 0, 0] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])  # half way
    layer.v_TKD[3:6, 0, 0] = torch.tensor([torch.inf, -torch.inf, 3e38])
    layer.run(cpu, step([64], [0], torch.arange(4, dtype=torch.int32)[None]))
    stored_TKD = layer.cache[:, :, 1].transpose(1, 2).reshape(layer.v_TKD.shape)
    assert same_bits(stored_TKD, layer.v_TKD.bfloat16())
