"""Measure the speed of a worker on its own steps and fetches: there is no calibration, and it is always
current.

    seconds of a step = step_s + token_s * prompt tokens + pair_s * (tokens before them) + row_s * streams

Least squares with exponential forgetting, over relative errors. A step that took ten times as long as it
should, for example the first one, counts a hundredth of an ordinary one. Pure.
"""

from dataclasses import replace
from itertools import chain, combinations
from math import log

import numpy as np
import numpy.typing as npt

from tidemill.workers.messages import Speed

STEPS_MIN = 8
"""The number of steps with prompt tokens before a result."""

FETCHES_MIN = 3

FETCH_LASTS_S = 60.0
"""The time for which a throughput counts after the last fetch. Then fetches are tried again: the store may
be faster than it was, and a worker that computes everything would not notice."""

MEMORY_STEPS = 256
"""The decay: a step counts e times less after this many steps of its kind."""

MEMORY_FETCHES = 16

REFIT_STEPS = 16
NEWS_MAX = 256

FIRST_SAMPLES_MAX = 4096
FIRST_FITS = 4
"""The number of fits of the first samples. Their errors are relative to the usual time, then to the result of
the fit before: relative to its own time, a step that seems to take none would outweigh all others."""

SAMPLE_S = 0.01
"""Steps without a pause between them make one sample until they took this long together. A step that is
noticed late takes time from the next one, of which nothing may be left."""

SECONDS_MIN = 1e-5
PRECISION = 1e-4
"""The mean square of the relative error below which no formula is better than another."""

UNITS = np.array([1.0, 1024.0, 1024.0**2, 16.0])
"""The scales of the four terms, so that their sums have the same order of magnitude."""

STEP, TOKEN, PAIR, ROW = range(4)
FORMULAS = [
    [TOKEN, *others]
    for others in chain.from_iterable(combinations((STEP, PAIR, ROW), count) for count in range(4))
]
"""The terms that may explain the samples. Prompt tokens are in all of them, because the speed predicts the
time of more prompt tokens."""

Vector = npt.NDArray[np.float64]


class StepTimeModel:
    """Estimates the time of a step. Recording costs next to nothing; the sums are computed on demand."""

    def __init__(self) -> None:
        self._kinds = _Sums(), _Sums()  # apart, so that hours of decoding do not make it forget prompts
        self._recent: list[Vector] = []
        self._sample = np.zeros(5)  # seconds, steps, prompt tokens, pairs, rows
        self._unfitted_steps = 0
        self._new_prompts = 0  # samples with prompts since the last attempt at a first fit
        self._fitted: Vector | None = None

    def stepped(
        self,
        seconds: float,
        *,
        steps: int = 1,
        prompt_tokens: int,
        pairs: int,
        rows: int,
        followed: bool = False,
    ) -> None:
        """Record the time of a step, or of several. `pairs` sums, over its prompt tokens, the tokens before
        each; `rows` are those that decoded; it is `followed` if the next one is in flight, whose time begins
        when this one is noticed."""
        self._sample += (seconds, steps, prompt_tokens, pairs, rows)
        if followed and self._sample[0] < SAMPLE_S:
            return
        self._recent.append(self._sample)
        self._new_prompts += self._sample[2] > 0
        self._sample = np.zeros(5)
        if len(self._recent) == (FIRST_SAMPLES_MAX if self._fitted is None else NEWS_MAX):
            self._take_recent()
            del self._recent[: len(self._recent) // 2]  # what gives no first fit

    @property
    def speed(self) -> Speed:
        """Return the speed; all 0 until there are enough samples."""
        self._take_recent()
        if self._fitted is not None and self._unfitted_steps >= REFIT_STEPS:
            fitted = _fit(*self._kinds)
            self._fitted = self._fitted if fitted is None else fitted
            self._unfitted_steps = 0
        if self._fitted is None:
            return Speed()
        step_s, token_s, pair_s, row_s = (self._fitted / UNITS).tolist()
        return Speed(step_s=step_s, token_s=token_s, pair_s=pair_s, row_s=row_s)

    def _begin(self) -> None:
        """Fit the samples so far, if there are enough."""
        if self._new_prompts < STEPS_MIN:
            return
        self._new_prompts = 0
        recent = np.array(self._recent)
        prompts = recent[:, 2] > 0
        usual_s = np.zeros(len(recent))
        for group in (prompts, ~prompts):
            usual_s[group] = np.median(recent[group, 0]) if group.any() else 0.0
        for _ in range(FIRST_FITS):
            self._kinds = _Sums(), _Sums()
            self._add(recent, usual_s)
            self._fitted = _fit(*self._kinds)
            if self._fitted is None:
                return
        self._recent.clear()

    def _take_recent(self) -> None:
        if self._fitted is None:
            self._begin()
            return
        if not self._recent:
            return
        recent = np.array(self._recent)
        self._recent.clear()
        self._unfitted_steps += len(recent)
        self._add(recent)

    def _add(self, samples: Vector, usual_s: Vector | float = 0.0) -> None:
        """Add samples. `usual_s` are their times while none is predicted."""
        terms, seconds = samples[:, 1:] / UNITS, np.maximum(samples[:, 0], SECONDS_MIN)
        # A step can seem short because the previous one was noticed late. That is no change of speed either.
        scale_s = np.maximum(seconds, usual_s if self._fitted is None else terms @ self._fitted)
        prompts = samples[:, 2] > 0
        for sums, group in zip(self._kinds, (prompts, ~prompts), strict=True):
            sums.add(terms[group] / scale_s[group, None], seconds[group] / scale_s[group])


class Throughput:
    """The throughput of fetches from the store, as each of them sees it."""

    def __init__(self) -> None:
        self._fetches = 0
        self._bytes = 0.0
        self._seconds = 0.0
        self._last_s = 0.0

    def fetched(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """Record a fetch that has ended. Times are those of one clock."""
        if self._is_over(now_s):
            self._fetches, self._bytes, self._seconds = 0, 0.0, 0.0
        self._last_s = now_s
        self._fetches += 1
        kept = 1 - 1 / MEMORY_FETCHES
        self._bytes = kept * self._bytes + num_bytes
        self._seconds = kept * self._seconds + max(seconds, SECONDS_MIN)

    def with_throughput(self, speed: Speed, now_s: float) -> Speed:
        """Return `speed` with this throughput, if it is known."""
        if self._fetches < FETCHES_MIN or self._is_over(now_s):
            return speed
        return replace(speed, fetch_bytes_per_s=self._bytes / self._seconds)

    def _is_over(self, now_s: float) -> bool:
        return now_s - self._last_s > FETCH_LASTS_S


class _Sums:
    """The sums of least squares over all steps so far."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.products = np.zeros((4, 4))
        self.seen = np.zeros(4)
        self.square = 0.0

    def add(self, scaled: Vector, shares: Vector) -> None:
        """Add steps in order: the `scaled` terms [N, 4] should add up to the `shares` [N]."""
        kept = 1 - 1 / MEMORY_STEPS
        weights = kept ** np.arange(len(shares) - 1, -1, -1)
        before = kept ** len(shares)
        self.weight = before * self.weight + float(weights.sum())
        self.products = before * self.products + (scaled.T * weights) @ scaled
        self.seen = before * self.seen + scaled.T @ (weights * shares)
        self.square = before * self.square + float(weights @ shares**2)


def _fit(*kinds: _Sums) -> Vector | None:
    """Return the best formula whose terms are all positive. Another term must improve Schwarz's criterion:
    otherwise short prompts, which cannot show a slope, would invent one for long prompts."""
    products = sum((sums.products for sums in kinds), np.zeros((4, 4)))
    seen = sum((sums.seen for sums in kinds), np.zeros(4))
    square = sum(sums.square for sums in kinds)
    weight = sum(sums.weight for sums in kinds)
    best: tuple[float, Vector] | None = None
    for terms in FORMULAS:
        fitted = np.zeros(4)
        fitted[terms] = np.linalg.lstsq(products[np.ix_(terms, terms)], seen[terms], rcond=None)[0]
        if (fitted[terms] <= 0).any():
            continue
        error = max(0.0, square - 2 * fitted @ seen + fitted @ products @ fitted) / weight
        badness = weight * log(error + PRECISION) + len(terms) * log(weight)
        if best is None or badness < best[0]:
            best = badness, fitted
    return None if best is None else best[1]
