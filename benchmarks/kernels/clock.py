"""CPU time of calls, and what this machine reaches at best: its rooflines."""

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

SAMPLE_SECONDS = 1e-3
SMALLEST_BYTES = 1 << 18  # copies of less measure the call
MATRIX = 1024


def best_seconds(call: Call, budget_seconds: float, clock: Callable[[], float] = time.process_time) -> float:
    """CPU seconds of a call, or those of another clock, from the fastest of samples that are long enough."""
    call()
    count, best, spent = 1, float("inf"), 0.0
    while spent < budget_seconds:
        start = clock()
        for _ in range(count):
            call()
        took = clock() - start
        spent += took
        if took < SAMPLE_SECONDS:
            count *= 2
        else:
            best = min(best, took / count)
    return best


class Roofline:
    """Bytes and float32 FLOPs per CPU second of one thread, as plain torch reaches them at best."""

    def __init__(self, budget_seconds: float) -> None:
        self._budget_seconds = budget_seconds
        self._bytes_s: dict[int, float] = {}
        self._flops_s = 0.0
        self._matrices = torch.randn(2, MATRIX, MATRIX)

    def look(self, num_bytes: float) -> None:
        """Once more: a copy of as many bytes, read and written ones together, and a product of matrices. Of
        each what was best counts."""
        size = rounded(num_bytes)
        source = torch.ones(size // 2, dtype=torch.uint8)
        target = torch.empty_like(source)
        copied = size / best_seconds(lambda: target.copy_(source), self._budget_seconds)
        self._bytes_s[size] = max(self._bytes_s.get(size, 0.0), copied)
        a, b = self._matrices
        computed = 2.0 * MATRIX**3 / best_seconds(lambda: a @ b, self._budget_seconds)
        self._flops_s = max(self._flops_s, computed)

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Return the least time for moving and computing this much."""
        return max(num_bytes / self._bytes_s[rounded(num_bytes)], flops / self._flops_s)


def rounded(num_bytes: float) -> int:
    """Round to a power of 2: caches serve copies of similar sizes alike."""
    return 1 << (max(SMALLEST_BYTES, int(num_bytes)) - 1).bit_length()
