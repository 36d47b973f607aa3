"""The cheapest arrangement of workers that meets the targets, by a search over predictions. Pure.

    levels    cost 1: mixed 1      cost 2: mixed 2, prefill 1 + decode 1      cost 3: ...
              bounds drop what cannot meet the targets; the rest is predicted, level after level,
              until a level has an arrangement that meets them

Levels ascend by one, and from LEVELS_EXACT on by at most 5 %, so the choice costs at most 5 % more than the
cheapest of all arrangements would.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEVELS_EXACT = 20
GROWTH = 1.05


class Arrangement(NamedTuple):
    """Workers by role, each with `ranks` cards of one kind, or with the cores of one rank."""

    card: str
    ranks: int
    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def cost(self) -> int:
        """The number of cards, or of ranks of this machine."""
        return self.workers * self.ranks

    def __str__(self) -> str:
        roles = (("mixed", self.mixed), ("prefill", self.prefill), ("decode", self.decode))
        named = " + ".join(f"{count} {role}" for role, count in roles if count)
        return f"{named}, TP {self.ranks}" if self.ranks > 1 else named


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The longest times of a share of all requests and of all gaps between tokens; None: any."""

    ttft_s: float | None
    itl_s: float | None
    percentile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The times at the percentile of the targets, and the figures of the simulation."""

    ttft_s: float
    itl_s: float
    unanswered: int
    figures: dict[str, object]

    def excess(self, targets: Targets) -> tuple[float, float]:
        """Return the times to the first token and between tokens in parts of their targets; above 1 they are
        missed."""
        return self.ttft_s / (targets.ttft_s or float("inf")), self.itl_s / (targets.itl_s or float("inf"))

    def meets(self, targets: Targets) -> bool:
        return not self.unanswered and max(self.excess(targets)) <= 1


class Tried(NamedTuple):
    """An arrangement and what it would do."""

    arrangement: Arrangement
    prediction: Prediction
    meets: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All arrangements that were predicted, in order, and the chosen one, which is None if none meets the
    targets."""

    tried: list[Tried]
    chosen: Tried | None


def search(
    card: str,
    ranks: Sequence[int],
    cost_max: int,
    *,
    may_meet: Callable[[Arrangement], bool],
    predict: Callable[[Arrangement], Prediction],
    targets: Targets,
) -> Found:
    """Return the cheapest arrangement of a card that meets the targets, of several the one that is farthest
    from missing them. `may_meet` is False only for what cannot meet them."""
    tried: list[Tried] = []
    for cost in levels(cost_max):
        good: list[Tried] = []
        for arrangement in _at_level(card, ranks, cost):
            if not may_meet(arrangement) or any(_is_worse(arrangement, other, targets) for other in tried):
                continue
            prediction = predict(arrangement)
            tried.append(Tried(arrangement, prediction, prediction.meets(targets)))
            good += [tried[-1]] if tried[-1].meets else []
        if good:
            return Found(tried=tried, chosen=min(good, key=lambda row: max(row.prediction.excess(targets))))
    return Found(tried=tried, chosen=None)


def levels(cost_max: int) -> Iterator[int]:
    """Yield the costs at which arrangements are predicted, ascending."""
    cost = 1
    while cost <= cost_max:
        yield cost
        cost = cost + 1 if cost < LEVELS_EXACT else max(cost + 1, int(cost * GROWTH))


def _at_level(card: str, ranks: Sequence[int], cost: int) -> Iterator[Arrangement]:
    """Yield the arrangements of this cost. Where workers of some ranks do not divide it, they cost the most
    below it that the level before did not have."""
    for size in ranks:
        workers = cost // size
        before = 0 if cost == 1 else _before(cost) // size
        if not workers or workers == before:
            continue
        yield Arrangement(card, size, mixed=workers)
        for prefill in range(1, workers):
            yield Arrangement(card, size, prefill=prefill, decode=workers - prefill)


def _before(cost: int) -> int:
    """Return the level before one."""
    return max(level for level in levels(cost - 1))


def _is_worse(arrangement: Arrangement, other: Tried, targets: Targets) -> bool:
    """Return whether an arrangement will miss a target because one with more of what the target needs has
    missed it: the time to the first token needs prefill workers, that between tokens decode workers."""
    known = other.arrangement
    if other.meets or known.ranks != arrangement.ranks or bool(known.mixed) != bool(arrangement.mixed):
        return False
    late_first, late_next = (excess > 1 for excess in other.prediction.excess(targets))
    fewer_decode = arrangement.decode <= known.decode
    if late_first and arrangement.prefill <= known.prefill and fewer_decode:
        return arrangement.mixed <= known.mixed
    return late_next and fewer_decode and arrangement.prefill >= known.prefill and not known.mixed
