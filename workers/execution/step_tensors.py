"""Convert the integers of a step to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from tidemill.workers.execution.step import Step
from tidemill.workers.models.inputs import Inputs, Kept

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def inputs_of(step: Step, tokens: list[int], page_tokens: int) -> Inputs:
    """Return the inputs of `step`. Each page table holds just the pages that its row's tokens reach. `tokens`
    are those of all rows."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    return Inputs(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor([position for row in step for position in range(row.start, row.end)]),
        cu_B1=int32(starts),
        pages_BN=_tables([row.pages[: -(-row.end // page_tokens)] for row in step]),
        windows_BN=_tables([row.windows[: -(-row.end // page_tokens)] for row in step]),
        lens_B=int32([row.end for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        writes_BK=torch.as_tensor(writes_of(step)),
    )


def kept_of(step: Step) -> Kept | None:
    """Return the tokens whose hidden states are read: those that draw, all of rows with scores, and one of
    other rows, since operators take a row of no token for padding. None: all are."""
    tokens: list[int] = []
    starts = [0]
    end = 0
    for row in step:
        end += len(row.tokens)
        draws = 1 if row.sampling_state is None else row.drafts + 1
        tokens += range(end - (draws if row.scores is None else len(row.tokens)), end)
        starts.append(len(tokens))
    if len(tokens) == end:
        return None
    return Kept(torch.tensor(tokens), torch.tensor(starts, dtype=torch.int32))


def _tables(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tables as rows of an int32 tensor, padded with zeros."""
    tables_BN = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for index, table in enumerate(tables):
        tables_BN[index, : len(table)] = table
    return torch.as_tensor(tables_BN)


def writes_of(step: Step) -> Ints:
    """Return [B, K] int32: the slots for the states after the last tokens of each row. K reaches all that the
    rows write."""
    kept = max((1 + row.end - row.writes[0].depth for row in step if row.writes), default=1)
    writes_BK = np.full((len(step), kept), -1, np.int32)
    for index, row in enumerate(step):
        for depth, state in row.writes:
            writes_BK[index, kept - 1 - (row.end - depth)] = state
    return writes_BK


def copies_of(step: Step) -> tuple[Ints, Ints]:
    """Return the checkpoints that the step restores, with their states, and the states that it saves, with
    their checkpoints: [2, N] int64 each."""
    restores = [(row.restores, row.read) for row in step if row.restores is not None]
    return _pairs(restores), _pairs([save for row in step for save in row.saves])


def _pairs(pairs: Sequence[tuple[int | None, int | None]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2).T.copy()


class TableChanges(NamedTuple):
    """The changes of a step: `slots_B` are those of its rows; entries `at_D` of the flat tables of pages
    become `pages_D`, likewise of windows. All are numpy arrays of int64, except that pages are int32."""

    slots_B: Ints
    at_D: Ints
    pages_D: Ints
    window_at_D: Ints
    windows_D: Ints


class PageTables:
    """A mirror of the page tables on a device, which has one for each slot. A step changes only the entries
    that differ.

    A sequence keeps its slot from step to step. There are twice as many as rows, so a new sequence takes the
    slot of one that is in neither this step nor the one before it.
    """

    def __init__(self, rows_max: int, table_width: int, *, windows: bool) -> None:
        """Create empty tables, for steps of up to `rows_max` rows of up to `table_width` pages."""
        self.pages_SN = np.zeros((2 * rows_max, table_width), np.int32)
        self.windows_SN = np.zeros((2 * rows_max, table_width * windows), np.int32)
        self._known: dict[str, _Known] = {}  # the sequence that was absent the longest is the first
        self._free = list(range(2 * rows_max))

    def update(self, step: Step) -> TableChanges:
        """Enter the tables of the step's rows."""
        known = self._known
        for row in step:
            if (held := known.pop(row.sequence_id, None)) is not None:
                known[row.sequence_id] = held
        pages, windows = _Changes(self.pages_SN), _Changes(self.windows_SN)
        slots: list[int] = []
        for row in step:
            held = known.get(row.sequence_id)
            if held is None:
                slot = self._free.pop() if self._free else known.pop(next(iter(known))).slot
                held = known[row.sequence_id] = _Known(slot)
            slots.append(held.slot)
            if row.pages is not held.pages:
                pages.enter(held.slot, row.pages)
                held.pages = row.pages
            if row.windows is not held.windows:
                windows.enter(held.slot, row.windows)
                held.windows = row.windows
        return TableChanges(np.array(slots), *pages.all(), *windows.all())

    def forget(self) -> None:
        """Enter every table completely from now on: the device may not have the last changes."""
        for held in self._known.values():
            held.pages = held.windows = None
        self.pages_SN.fill(-1)
        self.windows_SN.fill(-1)


@dataclass(slots=True)
class _Known:
    slot: int
    pages: Sequence[int] | None = None  # the tuple itself is compared: another one may differ
    windows: Sequence[int] | None = None


class _Changes:
    def __init__(self, tables_SN: Ints) -> None:
        self._tables_SN = tables_SN
        self._at: list[Ints] = []
        self._values: list[Ints] = []

    def enter(self, slot: int, table: Sequence[int]) -> None:
        new_N = np.array(table, np.int32)
        row_N = self._tables_SN[slot, : len(new_N)]
        at_D = np.flatnonzero(row_N != new_N)
        values_D = row_N[at_D] = new_N[at_D]
        self._at.append(at_D + slot * self._tables_SN.shape[1])
        self._values.append(values_D)

    def all(self) -> tuple[Ints, Ints]:
        if not self._at:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(self._at), np.concatenate(self._values)
