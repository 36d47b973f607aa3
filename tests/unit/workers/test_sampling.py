"""A draw follows the exact distribution and depends on nothing but logits, seed and position."""
# pyright: basic
# torch's conversions to lists are untyped.

from collections import Counter
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.messages import Sampling
from tidemill.workers.sampling import draw, uniform_of

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def random_logits(rows: int, vocabulary: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def distribution(logits_V: list[float], sampling: Sampling) -> dict[int, float]:
    """What may be drawn and how likely, in plain arithmetic: each filter looks at the whole distribution."""
    order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    best = logits_V[order[0]]
    weights = [exp((logits_V[token] - best) / sampling.temperature) for token in order]
    total, before = sum(weights), 0.0
    kept: dict[int, float] = {}
    for rank, (token, weight) in enumerate(zip(order, weights, strict=True)):
        in_k = not sampling.top_k or rank < sampling.top_k
        in_p = before < sampling.top_p * total
        if rank == 0 or (in_k and in_p and weight >= sampling.min_p):
            kept[token] = weight
        before += weight
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.4),
        Sampling(temperature=1.7, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=1.3, min_p=0.2),
        Sampling(temperature=2.0, top_k=9, top_p=0.7, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Pearson's chi-square over many positions of one seed; the bound is far out, the draws are fixed."""
    count = 6000
    logits_V = random_logits(1, 12, seed=3)
    drawn = Counter(
        token
        for start in range(0, count, 1000)
        for token in draw(logits_V.expand(1000, -1), [sampling] * 1000, range(start, start + 1000))
    )
    exact = distribution(logits_V[0].tolist(), sampling)
    assert drawn.keys() <= exact.keys()
    squares = [(drawn[token] - count * share) ** 2 / (count * share) for token, share in exact.items()]
    freedom = len(exact) - 1
    assert sum(squares) <= freedom + 4 * (2 * freedom) ** 0.5


@PROPERTY
@given(samplings, st.integers(1, 200), st.integers(0, 2**31), st.integers(0, 10_000))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(
    sampling: Sampling, vocabulary: int, logits_seed: int, position: int
) -> None:
    logits_V = random_logits(1, vocabulary, logits_seed)
    (token,) = draw(logits_V, [sampling], [position])
    cumulative, uniform = 0.0, uniform_of(sampling.seed, position)
    for candidate, share in distribution(logits_V[0].tolist(), sampling).items():
        below, cumulative = cumulative, cumulative + share
        if candidate == token:
            assert below - 1e-9 <= (0.0 if sampling.temperature == 0 else uniform) <= cumulative + 1e-9
            return
    pytest.fail(f"{token} was filtered out")


@PROPERTY
@given(st.lists(samplings, min_size=1, max_size=9), st.integers(1, 300), st.integers(0, 2**31))
def test_rows_do_not_see_each_other(drawn_with: list[Sampling], vocabulary: int, logits_seed: int) -> None:
    logits_NV = random_logits(len(drawn_with), vocabulary, logits_seed)
    positions = [7 * row for row in range(len(drawn_with))]
    together = draw(logits_NV, drawn_with, positions)
    alone = [
        draw(logits_NV[row : row + 1], [sampling], [positions[row]])[0]
        for row, sampling in enumerate(drawn_with)
    ]
    assert together == alone
    backwards = draw(logits_NV.flip(0), drawn_with[::-1], positions[::-1])
    assert backwards[::-1] == together


def test_ties_go_to_the_lower_id() -> None:
    logits_NV = torch.zeros(1, 70)
    assert draw(logits_NV, [Sampling(temperature=0)], [0]) == [0]
    assert draw(logits_NV, [Sampling(top_k=1)], [0]) == [0]
    assert {draw(logits_NV, [Sampling(top_k=3)], [position])[0] for position in range(60)} == {0, 1, 2}


def test_every_token_of_the_vocabulary_and_none_beyond_can_be_drawn() -> None:
    logits_NV = torch.zeros(1, 3).expand(300, -1)
    assert set(draw(logits_NV, [Sampling()] * 300, range(300))) == {0, 1, 2}


def test_a_forbidden_token_is_never_drawn() -> None:
    logits_NV = torch.tensor([[0.0, -torch.inf, 1.0]]).expand(300, -1)
    assert set(draw(logits_NV, [Sampling(temperature=5.0)] * 300, range(300))) == {0, 2}


@PROPERTY
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_uniform_numbers_are_in_range_and_belong_to_seed_and_position(seed: int, position: int) -> None:
    uniform = uniform_of(seed, position)
    assert 0 <= uniform < 1
    assert uniform == uniform_of(seed, position)
    assert uniform != uniform_of(seed, position + 1)
    assert uniform != uniform_of(seed ^ 1, position)


def test_uniform_numbers_are_uniform() -> None:
    counts = Counter(int(10 * uniform_of(seed, position)) for seed in range(40) for position in range(100))
    assert all(abs(counts[tenth] - 400) < 80 for tenth in range(10))


def test_workers_of_different_versions_draw_alike() -> None:
    """A stream moves between them: this number may only change together with the way streams move."""
    assert uniform_of(5, 100) == 0.5148014099128798
