"""Divides the memory of a device among its workers: demand first, the rest where a cache is short. Pure.

Each worker has a row of claims, each at least as high as the one before.
All workers are raised to their first claims, then to their second, until the memory is used up.
Claims that cannot all be met are filled to one level, like connected vessels.

    floor | need | comfort | a short cache: keep, then grow | others: in use, assigned | max

A worker is lowered only for another worker's claim, and not for a trifle while every need is met.

A change has two phases. A worker can be lowered immediately, but another is raised only by what is free:

    free = total - sum of max(budget reported, bytes mapped, budget assigned)

A lost answer, a slow worker or a lost worker therefore costs time and never memory that does not exist.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

NUM_CLAIMS = 8

COMFORT_SHARE = 4
"""A worker should have this part of its need in addition, so that its rows can grow."""

MARGINS = 8
"""The least of that is the device's memory divided by this and by the number of its workers; half of it is
a trifle.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A worker's memory on its device and its demand, in bytes.

    `told_bytes` is the budget that the last answer assigned, and `budget_bytes` before the first.
    Running requests hold `live_bytes`, waiting requests need `wanted_bytes`.
    `pressed` says that it recently had to evict cached memory or preempt a request.
    """

    floor_bytes: int
    max_bytes: int
    budget_bytes: int
    told_bytes: int
    mapped_bytes: int = 0
    live_bytes: int = 0
    cached_bytes: int = 0
    wanted_bytes: int = 0
    pressed: bool = False
    pinned_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        """Return the most that it may have taken: a report arrives after every earlier answer had its
        effect or was lost for good.
        """
        return max(self.budget_bytes, self.mapped_bytes, self.told_bytes)

    @property
    def need_bytes(self) -> int:
        """Return the budget for every request to run, within the worker's bounds."""
        if self.pinned_bytes is not None:
            return self._within(self.pinned_bytes)
        return self._within(self.live_bytes + self.wanted_bytes)

    def claims(self, margin_bytes: int) -> list[int]:
        """Return its claims, the most urgent first."""
        need, told = self.need_bytes, self.told_bytes
        if self.pinned_bytes is not None:
            return [need] * NUM_CLAIMS
        rising = (
            self.floor_bytes,
            need,
            need + max(need // COMFORT_SHARE, margin_bytes),
            told if self.pressed else 0,
            told + margin_bytes if self.pressed else 0,
            min(told, self.live_bytes + self.cached_bytes),
            told,
            self.max_bytes,
        )
        assert len(rising) == NUM_CLAIMS
        return list(accumulate(map(self._within, rising), max))

    def _within(self, num_bytes: int) -> int:
        return min(max(num_bytes, self.floor_bytes), self.max_bytes)


def rebalance(accounts: Mapping[str, Account], total_bytes: int) -> dict[str, int]:
    """Return the new budget of each worker, by name, of the `total_bytes` of their device.

    Each is between floor and max, given that what workers hold is.
    What all of them may have taken is then at most `total_bytes`, or what it was before.
    """
    margin_bytes = total_bytes // (MARGINS * max(1, len(accounts)))
    targets = _targets(accounts, total_bytes, margin_bytes)
    is_short = any(
        account.told_bytes < account.need_bytes <= targets[name] for name, account in accounts.items()
    )
    free_bytes = total_bytes - held_bytes(accounts.values())
    budgets: dict[str, int] = {}
    for name in sorted(accounts):
        account, target = accounts[name], targets[name]
        trifle = account.told_bytes - target < margin_bytes // 2
        if target < account.told_bytes and trifle and not is_short and free_bytes >= 0:
            target = account.told_bytes
        raised_bytes = max(0, min(target - account.held_bytes, free_bytes))
        free_bytes -= raised_bytes
        budgets[name] = min(target, account.held_bytes + raised_bytes)
    return budgets


def held_bytes(accounts: Iterable[Account]) -> int:
    """Return the most that all of them may have taken."""
    return sum(account.held_bytes for account in accounts)


def _targets(accounts: Mapping[str, Account], total_bytes: int, margin_bytes: int) -> dict[str, int]:
    rows = [account.claims(margin_bytes) for account in accounts.values()]
    given = [row[0] for row in rows]
    for column in zip(*rows, strict=True):
        given = _poured(given, [row[0] for row in rows], column, total_bytes)
    return dict(zip(accounts, given, strict=True))


def _poured(given: list[int], floors: list[int], claims: Sequence[int], total_bytes: int) -> list[int]:
    """Return `given`, raised towards `claims` to the highest common level above the floors that the memory
    allows.
    """

    def up_to(level_bytes: int) -> list[int]:
        return [
            min(claim, max(have, floor + level_bytes))
            for have, floor, claim in zip(given, floors, claims, strict=True)
        ]

    levels = range(max(claims) + 1)
    num_possible = bisect_right(levels, total_bytes, key=lambda level_bytes: sum(up_to(level_bytes)))
    return up_to(num_possible - 1) if num_possible else given
