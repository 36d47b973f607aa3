"""The cost of a prompt on each worker, in seconds where speeds are known, else in prompt tokens.

0              start               stored                end
|-- on worker --|----- fetched ------|----- computed -----|
"""

import numpy as np
import numpy.typing as npt

from tidemill.cluster.router.fleet_view import FETCHED_SHARE, Column, Table
from tidemill.workers.scheduling.prefill_throttle import LIGHT_STEPS, prompt_slowdown

Vector = npt.NDArray[np.float64]
"""A number for each slot; undefined for vacant slots."""

ROW_TOKENS = 16.0
"""The cost of one more row in the steps of a worker while speeds are unknown, in prompt tokens."""

MEASURED = [Column.STEP_S, Column.TOKEN_S, Column.PAIR_S, Column.ROW_S, Column.PAGE_S, Column.STATE_S]


class Costs:
    """The costs on the workers of `table`, which may be some columns of the fleet's table.

    They are in seconds as soon as one worker has measured its speed. A worker that has not is
    assumed to have the median speed of those that have.
    """

    def __init__(self, table: Table, now_s: float, like: Table) -> None:
        """`like` is the table of all workers."""
        self.in_seconds = bool(like[Column.TOKEN_S].any())
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
        decodes = table[Column.DECODES] > 0
        self._has_streams = decodes & (table[Column.STREAMS] > 0)
        self._has_rows = decodes & (table[Column.ROWS] > 0)
        self._light: Vector = self.step + self.row * np.maximum(table[Column.STREAMS], 1.0)
        self._slowdown: Vector = np.full_like(self.wait, LIGHT_STEPS / (LIGHT_STEPS - 1))
        if self.in_seconds:
            self._slowdown[:] = prompt_slowdown(
                self._light,
                table[Column.ITL_TARGET_S],
                step_s=self.step,
                token_s=self.token,
                page_tokens=self.page_tokens,
                tokens_max=self.step_tokens,
            )
        self.slowdown: Vector = np.where(self._has_streams, self._slowdown, 1.0)  # of prompts

    def computing(self, start: Vector | float, end: float) -> Vector:
        """Return the cost of prompt tokens `[start, end)` in steps of their own; `start <= end`."""
        num_tokens = end - start
        each = self.token + self.pair * ((start + end) / 2)
        return np.ceil(num_tokens / self.step_tokens) * self.step + num_tokens * each

    def beside(self, alone: Vector, answer_tokens: int) -> Vector:
        """Return the cost of prompts beside the streams of now, or beside the answers, each of
        `answer_tokens`, of the prompts that wait before them. `alone` is their cost without streams."""
        slowed = alone * self._slowdown
        beside_next = np.minimum(slowed, alone + answer_tokens * self._light)
        return np.where(self._has_streams, slowed, np.where(self._has_rows, beside_next, alone))

    def serving(self, start: Vector, stored: float, end: float) -> Vector:
        """Return the cost of the prompt `[0, end)` where the worker has `[0, start)`. The store has `[0,
        stored)`. The worker fetches or computes the rest of that, whichever costs less."""
        computed = self.computing(start, end)
        missing = stored - start
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
