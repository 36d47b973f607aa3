"""Record the calls that compute a step on CPU, and make them again for steps of any size, without Python.

    record    Python runs twice, with few tokens; each call of a C++ function is kept with its arguments
    replay    the same calls in one, on what their inputs hold then, with the sizes of another step

A step is about a hundred calls, between which Python takes a tenth of the time of a step of few rows. The
arguments of both runs are the same numbers, or the sizes of their steps, which a replay replaces. So results
are the same: they are the same calls. What torch computes between them (a look-up, a scale, a copy) a replay
computes with torch, into the same memory. There is no replay where arguments depend on sizes otherwise, where
torch writes in place, and where Python reads what was computed.
"""

import sys
from collections.abc import Callable
from math import ceil, prod
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tidemill.kernels.shared.build import Call, Library

ALIGNED_BYTES = 64
UNUSED = 2
"""`sys.getrefcount` of an item of the list of blocks that nothing else refers to."""

MAKES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Torch's functions that return memory and write nothing to it."""


class Sizes(NamedTuple):
    """The numbers of a step: its tokens, its rows, the states that a row may keep, and the tokens whose
    hidden states are read."""

    tokens: int
    rows: int
    states: int
    kept: int


RUNS = Sizes(37, 13, 17, 23), Sizes(41, 11, 19, 29)
"""The steps that are run. No two of these numbers are equal."""

Block: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Replay = Callable[[Sizes], torch.Tensor]
"""Computes a step of these sizes. The tensor is valid until the next one."""

Step = Callable[[Sizes], Callable[[], torch.Tensor]]
"""Prepares a step of these sizes, and returns the function that computes it."""

Capture = Callable[[Step, Sizes], Replay | None]
"""Runs the computations of two steps. Returns a function that makes them for steps of up to some sizes, whose
inputs lie in the same memory; None: they cannot be recorded."""


class Unrecordable(Exception):
    """Calls that cannot be made again for another step."""


class Recorder:
    """Records on one thread at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def capture(self, step: Step, most: Sizes) -> Replay | None:
        """See Capture."""
        memory = _Memory([], [])
        try:
            first, second = (self._recorded(step, sizes, most, memory) for sizes in RUNS)
            parts = [self._part(*pair) for pair in zip(first.parts, second.parts, strict=True)]
            result = _resized(first.result, second.result)
        except (Unrecordable, ValueError):  # of zip: one run has more parts
            return None

        def replay(sizes: Sizes) -> torch.Tensor:
            assert memory.blocks  # addresses do not keep them
            for part in parts:
                part(sizes)
            return result(sizes)

        return replay

    def _recorded(self, step: Step, sizes: Sizes, most: Sizes, memory: "_Memory") -> "_Recording":
        compute = step(sizes)
        recording = self._library.recording = _Recording(sizes, most, memory)
        try:
            with recording:
                result = compute()
        finally:
            self._library.recording = None
        recording.result = recording.without_block(result)
        return recording

    def _part(self, first: "_Part", second: "_Part") -> Callable[[Sizes], None]:
        """Return the function that does for other sizes what two runs did."""
        if isinstance(first, list) and isinstance(second, list):
            return self._calls(first, second)
        (one, spec), (other, spec_again) = tree_flatten(first), tree_flatten(second)
        if spec != spec_again:
            raise Unrecordable
        leaves = [_resized(*pair) for pair in zip(one, other, strict=True)]

        def compute(sizes: Sizes) -> None:
            function, args, kwargs, into = tree_unflatten([leaf(sizes) for leaf in leaves], spec)
            into.copy_(function(*args, **kwargs))

        return compute

    def _calls(self, first: list[Call], second: list[Call]) -> Callable[[Sizes], None]:
        words, again = (np.array(self._library.words(calls)) for calls in (first, second))
        if words.shape != again.shape:
            raise Unrecordable
        found = [
            np.flatnonzero((words == size) & (again == other)) for size, other in zip(*RUNS, strict=True)
        ]
        if set(np.flatnonzero(words != again)) - {int(at) for each in found for at in each}:
            raise Unrecordable

        def call(sizes: Sizes) -> None:
            for at, size in zip(found, sizes, strict=True):
                words[at] = size
            self._library.replay(words.ctypes.data, len(first))

        return call


def _resized(one: Any, other: Any) -> Callable[[Sizes], Any]:  # noqa: ANN401 - any argument
    """Return the function from sizes to what two runs had."""
    if isinstance(one, torch.Tensor):
        if one.data_ptr() != other.data_ptr() or one.stride() != other.stride():
            raise Unrecordable
        shape = [_resized(*pair) for pair in zip(one.shape, other.shape, strict=True)]
        return lambda sizes: one.as_strided([size(sizes) for size in shape], one.stride())
    if type(one) is int and (one, other) in zip(*RUNS, strict=True):
        at = RUNS[0].index(one)
        return lambda sizes: sizes[at]
    if one != other:
        raise Unrecordable
    return lambda _: one


class _Memory(NamedTuple):
    """The memory of a recording: blocks, and of each tensor that the first run made its block's index and its
    shape."""

    blocks: list[Block]
    tensors: list[tuple[int, torch.Size]]


_Part: TypeAlias = "list[Call] | tuple[Any, Any, Any, torch.Tensor]"
"""Calls, or a function of torch, its arguments, and the memory of its result."""


class _Recording(TorchDispatchMode):
    """The calls of one run. Tensors that it makes lie in blocks: memory is used again when nothing refers to
    it. Those of the second run lie where those of the first did."""

    result: torch.Tensor

    def __init__(self, sizes: Sizes, most: Sizes, memory: _Memory) -> None:
        super().__init__()
        self.parts: list[_Part] = []
        self._thread = get_ident()
        self._sizes, self._most = sizes, most
        self._blocks, self._tensors = memory
        self._known = iter(list(memory.tensors))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first step, which takes a second

    def called(self, index: int, given: tuple[float | None, ...]) -> None:
        if get_ident() != self._thread:
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, list):
            last.append((index, given))
        else:
            self.parts.append([(index, given)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's own
        """Run a function of torch: it makes memory, or a view, or computes a tensor from others."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in MAKES:
            return self._placed(result)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = {each.untyped_storage().data_ptr() for each in tensors}
        found = result if isinstance(result, (list, tuple)) else (result,)
        if not all(isinstance(each, torch.Tensor) for each in found):
            if given:  # Python reads what was computed
                raise Unrecordable
        elif func._schema.is_mutable:  # noqa: SLF001 - torch documents it
            raise Unrecordable
        elif any(each.untyped_storage().data_ptr() not in given for each in found):
            return self._computed(func, args, kwargs, result)
        return result

    def _computed(self, func, args, kwargs, result):  # noqa: ANN001, ANN202
        """Return the result of a function of torch in a block, into which a replay computes it again."""
        if not isinstance(result, torch.Tensor) or torch.Tag.dynamic_output_shape in func.tags:
            raise Unrecordable
        placed = self._placed(result).copy_(result)
        self.parts.append(tree_map_only(torch.Tensor, self.without_block, (func, args, kwargs, placed)))
        return placed

    def _placed(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor as `like` in a block."""
        num_bytes = like.untyped_storage().nbytes()
        if not num_bytes:
            return like
        if self._sizes == RUNS[0]:
            grows = (
                most / size for size, most in zip(self._sizes, self._most, strict=True) if size in like.shape
            )
            at = self._block(ceil(num_bytes * prod(grows)))
            self._tensors.append((at, like.shape))
        else:
            at, shape = next(self._known, (0, torch.Size()))
            for pair in zip(shape, like.shape, strict=True):
                _resized(*pair)  # a dimension that depends on sizes otherwise might need more memory
        block = self._blocks[at]
        return torch.from_numpy(block)[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())

    def without_block(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same tensor without a reference to its block, which others may use later."""
        for block in self._blocks:
            offset = tensor.data_ptr() - block.ctypes.data
            if 0 <= offset < block.nbytes:
                memory = torch.from_numpy(block[offset:])  # refers to what `block` is a view of
                whole = memory[: len(memory) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
                return whole.as_strided(tensor.shape, tensor.stride())
        return tensor

    def _block(self, num_bytes: int) -> int:
        """Return the index of a block that nothing else refers to, of those the smallest."""
        fits = [
            (self._blocks[at].nbytes, at)
            for at in range(len(self._blocks))
            if self._blocks[at].nbytes >= num_bytes and sys.getrefcount(self._blocks[at]) == UNUSED
        ]
        if fits:
            return min(fits)[1]
        memory = np.empty(num_bytes + ALIGNED_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNED_BYTES
        self._blocks.append(memory[start : start + num_bytes])
        return len(self._blocks) - 1
