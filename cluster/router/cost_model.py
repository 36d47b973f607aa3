"""What a prompt costs on each worker: seconds where their speeds are known, prompt tokens where not.

0            resident         restorable here          stored                  end
|---------------|- - - - - - - - - -|- - - - - - - - - - -|---------------------|
                                    |------ fetched ------|----- computed ------|
"""

import numpy as np
import numpy.typing as npt

from tidemill.cluster.router.fleet_view import FETCHED_SHARE, Column, Table

Vector = npt.NDArray[np.float64]
"""A number for each slot; of slots where nobody is it means nothing."""

ROW_TOKENS = 16.0
"""What one more row in a worker's steps costs while nobody knows how long they take, in prompt tokens."""

MEASURED = [Column.STEP_S, Column.TOKEN_S, Column.PAIR_S, Column.ROW_S, Column.PAGE_S, Column.STATE_S]


def measured(table: Table) -> bool:
    """Whether any worker knows how fast it is."""
    return bool(table[Column.TOKEN_S].any())


class Costs:
    """Compared in seconds as soon as one worker was measured: the others are taken to be like those in the
    middle. `table` may be that of the fleet, or some columns of it."""

    def __init__(self, table: Table, now_s: float, like: Table) -> None:
        """`like`: the table of all workers."""
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
        """Of the prompt tokens `[start, end)`, in steps of their own; `start` is not beyond `end`."""
        num_tokens = end - start
        each = self.token + self.pair * ((start + end) / 2)
        return np.ceil(num_tokens / self.step_tokens) * self.step + num_tokens * each

    def serving(self, here: Vector, stored: float, end: float) -> Vector:
        """Of the prompt `[0, end)` where the worker has `[0, here)` and the store `[0, stored)`, whichever is
        less: to fetch, or to compute what could be fetched."""
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
