# pyright: basic
# torch's dispatch and its exchange with numpy have no usable types.
"""Record the calls that compute a tensor on CPU, and make them again in one call, as CUDA graphs do.

    record    Python runs once; each call of a C++ function is kept with its addresses
    replay    the same calls without Python, on what their inputs hold then

A step of few rows is about a hundred calls, between which Python takes a tenth of its time. Results are the
same: they are the same calls. What torch itself computes would be missing, so a function in which it does
has no replay, except for `Recorder.first`.
"""

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tidemill.kernels.shared.build import Call, Library

ALIGNED_BYTES = 64
UNUSED = 3
"""`sys.getrefcount` of a block in a loop over the list, where nothing else refers to it."""

MAKES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Torch's functions that return memory and write nothing to it."""

Block: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Compute = Callable[[], torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Compute], tuple[Replay | None, torch.Tensor]]
"""Runs a function that computes a tensor. Returns a function that computes it again from the current inputs
(None: it cannot be recorded), and the tensor, which is valid until the next recording or replay of any."""


class Recorder:
    """Records on one thread at a time. The memory of all recordings is shared: one runs at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._blocks: list[Block] = []
        self._recording: _Recording | None = None

    def capture(self, run: Compute) -> tuple[Replay | None, torch.Tensor]:
        """See Capture. It runs once and whole, also where it cannot be recorded."""
        recording = self._recording = self._library.recording = _Recording(self._blocks)
        try:
            with recording:
                result = run()
        finally:
            self._recording = self._library.recording = None
        if not recording.is_complete:
            return None, result
        result = recording.released(result)
        replay, before = self._library.replay(recording.calls), recording.before

        def again() -> None:
            for compute in before:
                compute()
            replay()

        return again, result

    def first(self, compute: Compute) -> torch.Tensor:
        """Return what torch computes from the inputs of the step alone; a replay does that before all
        else."""
        recording = self._recording
        if recording is None or recording.thread != get_ident():
            return compute()
        recording.allows = True
        result = compute()
        recording.allows = False
        recording.before.append(lambda: result.copy_(compute()))
        return result


class _Recording(TorchDispatchMode):
    """The calls of one recording. Tensors that it makes lie in `blocks`: memory is used again when nothing
    refers to it, which a replay repeats in the same order."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.thread = get_ident()
        self.calls: list[Call] = []
        self.before: list[Callable[[], object]] = []
        self.allows = False  # torch computes what `before` repeats
        self.is_complete = True
        self._blocks = blocks

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first step, which takes a second

    def called(self, index: int, given: tuple[float | None, ...]) -> None:
        if get_ident() == self.thread:
            self.calls.append((index, given))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's own
        """Run a function of torch. It is no part of a replay, so it may make memory or views alone."""
        del types
        result = func(*args, **(kwargs or {}))
        if self.allows:
            return result
        if func.overloadpacket.__name__ in MAKES:
            return self._placed(result)
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        found = result if isinstance(result, list | tuple) else (result,)
        self.is_complete &= not func._schema.is_mutable and all(  # noqa: SLF001 - torch documents it
            isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in given for each in found
        )
        return result

    def _placed(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor as `like` in a block."""
        num_bytes = like.untyped_storage().nbytes()
        if not num_bytes:
            return like
        block = self._block(num_bytes)
        return torch.from_numpy(block)[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())

    def released(self, result: torch.Tensor) -> torch.Tensor:
        """Return the result as a tensor whose memory other recordings may use."""
        for block in self._blocks:
            offset = result.data_ptr() - block.ctypes.data
            if 0 <= offset < block.nbytes:
                memory = block[offset : offset + result.nbytes]  # without a reference to `block`
                return torch.from_numpy(memory).view(result.dtype).view(result.shape)
        return result

    def _block(self, num_bytes: int) -> Block:
        """Return a block that nothing else refers to, of those the smallest."""
        best: Block | None = None
        for block in self._blocks:
            if block.nbytes >= num_bytes and sys.getrefcount(block) == UNUSED:
                best = block if best is None or block.nbytes < best.nbytes else best
        if best is not None:
            return best
        memory = np.empty(num_bytes + ALIGNED_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNED_BYTES
        self._blocks.append(memory[start : start + num_bytes])
        return self._blocks[-1]
