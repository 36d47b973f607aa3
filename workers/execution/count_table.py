"""The count of each token in the answers that have penalties, on the device that draws."""

import weakref

import torch

from tidemill.workers.execution.sampling_state import SamplingState

SLOTS_MIN = 8


class CountTable:
    """An answer has a row from its first draw on, until its state is gone."""

    def __init__(self, device: torch.device) -> None:
        self.counts_SV = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._slots = weakref.WeakKeyDictionary[SamplingState, int]()
        self._free: list[int] = []

    def slot_of(self, state: SamplingState, vocabulary: int) -> int:
        """Return the row of an answer, which is zero at first."""
        slot = self._slots.get(state)
        if slot is None:
            if not self._free:
                self._grow(vocabulary)
            slot = self._slots[state] = self._free.pop()
            self.counts_SV[slot].zero_()
            weakref.finalize(state, self._free.append, slot).atexit = False
        return slot

    def _grow(self, vocabulary: int) -> None:
        had = len(self.counts_SV)
        counts_SV = self.counts_SV.new_empty(max(SLOTS_MIN, 2 * had), vocabulary)
        counts_SV[:had] = self.counts_SV.view(had, vocabulary)
        self.counts_SV = counts_SV
        self._free += range(had, len(counts_SV))
