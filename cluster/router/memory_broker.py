"""The memory broker: divides the memory of a device among its workers. Pure.

Each worker has a row of ascending claims. All workers are raised to their first claims, then to
their second ones, until the memory is used up. Claims that not all can have are filled to one level
(water-filling):

    floor | need | comfort | a short cache: keep, then grow | other caches: in use, assigned | max

A worker is lowered only when another worker's claim requires it. While every need is met, the
broker skips small changes.

A change has two phases. The broker assigns a lower budget to one worker, and raises another one
only by memory that is free:

    free = total - sum of max(budget reported, bytes mapped, budget assigned)

A lost message, a slow worker or a crashed one therefore costs time, but never exceeds the memory.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

NUM_CLAIMS = 8

COMFORT_SHARE = 4
"""The comfort of a worker is its need and one part in 4 more, so that its rows can grow."""

MARGINS = 8
"""The margin is the memory of the device / (8 * its workers), the least such addition. Changes below half a
margin are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The memory that a worker has and needs, in bytes.

    `assigned_bytes` is the budget last assigned to it, initially `budget_bytes`. Its running
    requests hold `live_bytes`, its waiting ones need `wanted_bytes`. A `pressed` worker recently
    had to evict cached memory or preempt a running request. An operator or its share fixes the
    budget to `pinned_bytes`.
    """

    floor_bytes: int
    max_bytes: int
    budget_bytes: int
    assigned_bytes: int
    mapped_bytes: int = 0
    live_bytes: int = 0
    cached_bytes: int = 0
    wanted_bytes: int = 0
    pressed: bool = False
    pinned_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        """The most memory that the worker may have taken. When a report arrives, every earlier assignment has
        taken effect or is lost for good."""
        return max(self.budget_bytes, self.mapped_bytes, self.assigned_bytes)

    @property
    def need_bytes(self) -> int:
        """The memory that all its requests need to run, within its limits."""
        if self.pinned_bytes is not None:
            return self._within(self.pinned_bytes)
        return self._within(self.live_bytes + self.wanted_bytes)

    def claims(self, margin_bytes: int) -> list[int]:
        """Return the claims of the worker, in ascending order, the most urgent one first."""
        need, assigned = self.need_bytes, self.assigned_bytes
        if self.pinned_bytes is not None:
            return [need] * NUM_CLAIMS
        rising = (
            self.floor_bytes,
            need,
            need + max(need // COMFORT_SHARE, margin_bytes),
            assigned if self.pressed else 0,
            assigned + margin_bytes if self.pressed else 0,
            min(assigned, self.live_bytes + self.cached_bytes),
            assigned,
            self.max_bytes,
        )
        assert len(rising) == NUM_CLAIMS
        return list(accumulate(map(self._within, rising), max))

    def _within(self, num_bytes: int) -> int:
        return min(max(num_bytes, self.floor_bytes), self.max_bytes)


def rebalance(accounts: Mapping[str, Account], total_bytes: int) -> dict[str, int]:
    """Return the new budget of each worker by name, out of the `total_bytes` of their device.

    Each budget is between floor and max if the memory that the worker holds is. All of them
    together may then have taken at most `total_bytes`, or what they may have taken before.
    """
    margin_bytes = total_bytes // (MARGINS * max(1, len(accounts)))
    targets = _targets(accounts, total_bytes, margin_bytes)
    is_short = any(
        account.assigned_bytes < account.need_bytes <= targets[name] for name, account in accounts.items()
    )
    free_bytes = total_bytes - held_bytes(accounts.values())
    budgets: dict[str, int] = {}
    for name in sorted(accounts):
        account, target = accounts[name], targets[name]
        is_small = account.assigned_bytes - target < margin_bytes // 2
        if target < account.assigned_bytes and is_small and not is_short and free_bytes >= 0:
            target = account.assigned_bytes
        raised_bytes = max(0, min(target - account.held_bytes, free_bytes))
        free_bytes -= raised_bytes
        budgets[name] = min(target, account.held_bytes + raised_bytes)
    return budgets


def held_bytes(accounts: Iterable[Account]) -> int:
    return sum(account.held_bytes for account in accounts)


def _targets(accounts: Mapping[str, Account], total_bytes: int, margin_bytes: int) -> dict[str, int]:
    rows = [account.claims(margin_bytes) for account in accounts.values()]
    given = [row[0] for row in rows]
    for column in zip(*rows, strict=True):
        given = _fill(given, [row[0] for row in rows], column, total_bytes)
    return dict(zip(accounts, given, strict=True))


def _fill(given: list[int], floors: list[int], claims: Sequence[int], total_bytes: int) -> list[int]:
    """Raise `given` towards `claims`, to the highest common level above the floors."""

    def up_to(level_bytes: int) -> list[int]:
        return [
            min(claim, max(have, floor + level_bytes))
            for have, floor, claim in zip(given, floors, claims, strict=True)
        ]

    levels = range(max(claims) + 1)
    num_possible = bisect_right(levels, total_bytes, key=lambda level_bytes: sum(up_to(level_bytes)))
    return up_to(num_possible - 1) if num_possible else given
