"""The cost of a prompt on each worker: seconds where speeds are known, prompt tokens otherwise.

0            resident         restorable here          stored                  end
|---------------|- - - - - - - - - -|- - - - - - - - - - -|---------------------|
                                    |------ fetched ------|----- computed ------|
"""

import numpy as np
import numpy.typing as npt

from tidemill.cluster.router.fleet_view import FETCHED_SHARE, Column, Table

Vector = npt.NDArray[np.float64]
"""A number for each slot; the number of an empty slot means nothing."""

ROW_TOKENS = 16.0
"""The cost of one more row in a worker's steps, in prompt tokens, while step times are unknown."""

MEASURED = [Column.STEP_S, Column.TOKEN_S, Column.PAIR_S, Column.ROW_S, Column.PAGE_S, Column.STATE_S]


def measured(table: Table) -> bool:
    """Return whether any worker has measured its speed."""
    return bool(table[Column.TOKEN_S].any())


class Costs:
    """Costs in seconds as soon as one worker was measured; workers without measurements count as the
    median.
    `table` may be the fleet's, or some of its columns.
    """

    def __init__(self, table: Table, now_s: float, like: Table) -> None:
        """`like` is the table of all workers."""
        self.in_seconds = measured(like)
        self.page_tokens: Vector = table[Column.PAGE_TOKENS]
        self.step_tokens: Vector = table[Column.STEP_TOKENS]
        if self.in_seconds:
            self.wait: Vector = np.maximum(0.0, table[Column.BUSY_UNTIL_S] - now_s)
            speeds = _speeds(table, like)
        else:
            self.wait = table[Column.QUEUED_TOKENS]
            speeds = np.zeros((len(MEASURED), table.shape[1]))
            speeds[1], speeds[3], speeds[4] = 1.0, ROW_TOKENS, self.page_tokens * FETCHED_SHARE
        self.step, self.token, self.pair, self.row, self.page, self.state = speeds

    def computing(self, start: Vector | float, end: float) -> Vector:
        """Return the cost of computing prompt tokens `[start, end)` in steps of their own; `start <= end`."""
        num_tokens = end - start
        each = self.token + self.pair * ((start + end) / 2)
        return np.ceil(num_tokens / self.step_tokens) * self.step + num_tokens * each

    def serving(self, here: Vector, stored: float, end: float) -> Vector:
        """Return the cost of prompt `[0, end)` where the worker has `[0, here)` and the store has `[0,
        stored)`.
        It is the lesser of fetching what the store has, and computing it.
        """
        computed = self.computing(here, end)
        missing = stored - here
        if not (missing > 0).any():
            return computed
        fetched = missing / self.page_tokens * self.page + self.state + self.computing(stored, end)
        return np.where(missing > 0, np.minimum(computed, fetched), computed)


def _speeds(table: Table, like: Table) -> Table:
    speeds: Table = table[MEASURED]
    missing = table[Column.TOKEN_S] == 0
    if missing.any():
        known = like[:, like[Column.TOKEN_S] > 0][MEASURED]
        speeds[:, missing] = np.median(known, axis=1)[:, None]
    return speeds
