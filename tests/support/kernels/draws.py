"""Tables of draws, and rows of scores that are hard to draw from."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp

import torch

from tidemill.kernels.draw.tables import AdjustmentField, DrawField, least_of, scale_of
from tidemill.workers.execution.sampler import uniform_of
from tidemill.workers.messages import Sampling

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Filters:
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


FILTERS = (
    Filters(temperature=0.0),
    Filters(),
    Filters(temperature=1e-30),
    Filters(temperature=60.0),
    Filters(top_k=1),
    Filters(top_k=7),
    Filters(top_k=10**6),
    Filters(top_p=0.0),
    Filters(top_p=0.5),
    Filters(top_p=0.95, temperature=3.0),
    Filters(top_p=1 - 1e-12),
    Filters(min_p=0.1),
    Filters(min_p=1.0),
    Filters(top_k=9, top_p=0.9, min_p=0.02, temperature=1.5),
)


def draws_of(asked: Sequence[tuple[int, float, Filters]]) -> tuple[torch.Tensor, int]:
    """Return the table of draws, each given as source, uniform number and filters, and how many filter."""
    draws_NF = torch.zeros(len(asked), len(DrawField), dtype=torch.float64)
    rooms = 0
    for entry, (source, uniform, filters) in zip(draws_NF, asked, strict=True):
        entry[DrawField.SOURCE], entry[DrawField.UNIFORM] = source, uniform
        entry[DrawField.SCALE], entry[DrawField.ROOM] = scale_of(filters.temperature), -1
        if filters.filtered and filters.temperature > 0:
            entry[DrawField.ROOM], rooms = rooms, rooms + 1
        entry[DrawField.TOP_K], entry[DrawField.TOP_P] = filters.top_k, filters.top_p
        entry[DrawField.LEAST] = least_of(filters.min_p)
    return draws_NF, rooms


def scores_of(vocabulary: int) -> torch.Tensor:
    """Return rows of noise: steep, flat, coarse with many equal scores, both zeros, and what a mask, a bias
    or a broken model leaves."""
    noise_RV = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    noise_RV[0] *= 4
    noise_RV[1] *= 0.1
    noise_RV[2] = (2 * noise_RV[2]).round()
    noise_RV[3] = torch.where(noise_RV[3] > 0, 0.0, -0.0)
    noise_RV[4, torch.arange(vocabulary) % 3 > 0] = -torch.inf
    noise_RV[5, :: 2 + vocabulary // 3] = torch.nan
    noise_RV[6] = -torch.inf
    noise_RV[7, vocabulary // 2 :] = torch.inf
    return noise_RV


UNIFORMS = (0.0, 0.3, 0.77, 1 - 2**-53)


def every_draw(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return the arguments of `draw`: every row, half of them as adjusted scores, with every filter."""
    scores_RV = scores_of(vocabulary)
    half = len(scores_RV) // 2
    asked = [
        (source if source < half else half - 1 - source, uniform, filters)
        for source, (filters, uniform) in product(
            range(len(scores_RV)), zip(FILTERS, UNIFORMS * len(FILTERS), strict=False)
        )
    ]
    wide_RV = torch.full((half, vocabulary + 5), torch.nan)[:, 5:]
    wide_RV.copy_(scores_RV[:half])
    return wide_RV, scores_RV[half:], *draws_of(asked)


def every_adjustment(vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield the arguments of `adjust`: rows with and without counts, masks and items."""
    generator = torch.Generator().manual_seed(vocabulary)
    yield torch.randn(3, vocabulary + 3, generator=generator)[:, 3:]
    counts_SV = torch.randint(-3, 4, (2, vocabulary), generator=generator, dtype=torch.int32).clamp(min=0)
    counts_SV[:, ::3] += 1 << 30
    yield counts_SV
    words = -(-vocabulary // 32)
    yield torch.randint(-(2**31), 2**31, (2, words + 1), generator=generator, dtype=torch.int32)
    last = vocabulary - 1
    rows = [
        (0, -1, 1, 0, 0, -1, 0, 0),
        (1, 1, 1.3, 0.5, -0.25, -1, 0, 0),
        (2, 0, 0.7, -1.5, 0.1, 1, 0, 2),
        (0, 1, 1.1, 0.3, 0.7, -1, 2, 4),
        (1, -1, 1.5, 0.3, 0.7, 0, 4, 6),
    ]
    assert all(len(row) == len(AdjustmentField) for row in rows)
    yield torch.tensor(rows, dtype=torch.float64)
    items = [(0, 0, 2.5), (last, 2, 0.0), (0, 1, -torch.inf), (last, 0, 0.1), (0, 3, 0.5), (last, 0, -100)]
    yield torch.tensor(items, dtype=torch.float64)


def distribution(logits_V: list[float], sampling: Filters | Sampling) -> dict[int, float]:
    """Return what may be drawn and its probability, in plain arithmetic: each filter looks at the whole
    distribution. In the order of the cumulative distribution: by falling logit with filters, else by id."""
    order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))
    best = logits_V[order[0]]
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        order.sort()
    weights = [exp((logits_V[token] - best) / sampling.temperature) for token in order]
    total, before = sum(weights), 0.0
    kept: dict[int, float] = {}
    for rank, (token, weight) in enumerate(zip(order, weights, strict=True)):
        in_k = not sampling.top_k or rank < sampling.top_k
        in_p = before < sampling.top_p * total or sampling.top_p == 1
        if rank == 0 or (in_k and in_p and weight >= sampling.min_p):
            kept[token] = weight
        before += weight
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def assert_distributed(drawn: Counter[int], exact: Mapping[int, float]) -> None:
    """Pearson's chi-square; the bound is far out, the draws are fixed."""
    count = drawn.total()
    assert drawn.keys() <= exact.keys()
    squares = [(drawn[token] - count * share) ** 2 / (count * share) for token, share in exact.items()]
    freedom = len(exact) - 1
    assert sum(squares) <= freedom + 4 * (2 * freedom) ** 0.5


DISTRIBUTIONS = (
    Filters(temperature=1.0),
    Filters(temperature=1.7, top_k=5),
    Filters(top_p=0.8),
    Filters(temperature=1.3, min_p=0.2),
    Filters(temperature=2.0, top_k=9, top_p=0.7, min_p=0.05),
)


def check_distribution(draw: Draw, filters: Filters, count: int) -> None:
    """Draw `count` tokens of one row by a variant, half of them over seeds and half over positions."""
    scores_V = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3))
    scores_V[7] = scores_V[4]
    uniforms = [uniform_of(n, 7) if n % 2 else uniform_of(0, n) for n in range(count)]
    tokens_N = draw(
        scores_V[None], scores_V[None][:0], *draws_of([(0, uniform, filters) for uniform in uniforms])
    )
    assert_distributed(Counter(map(int, tokens_N)), distribution([*map(float, scores_V)], filters))
