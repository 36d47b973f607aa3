"""The inputs of a model's forward pass: one step as tensors, and its caches as views of the arena."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from math import prod
from typing import NamedTuple, assert_never

import torch

from tidemill.kernels.shared.fp8 import Fp8, Pages, fixed_scales
from tidemill.kvstore.layout import (
    KV_FORMATS,
    WORD_BYTES,
    Attention,
    Latent,
    Layout,
    Linear,
    StateDtype,
    Window,
    slices_of,
)

ALIGNED_BYTES = 16
"""The alignment in bytes: kernels are compiled once for multiples of it, and once for other addresses."""

KV_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, row.element) for name, row in KV_FORMATS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One step over B rows with T tokens in all; row b runs tokens `[cu[b], cu[b + 1])` of one sequence.

    tokens_T        int64, token ids
    positions_T     int64, absolute position of each token in its sequence
    cu_B1           int32, row starts; cu[B] = T
    lens_B          int32, tokens of the sequence after this step, including those of the row
    read_B          int32, state id to start from, -1 for the empty state
    writes_BK       int32, state ids that receive the states after the row's last K tokens, the last column
                    after its last one (any of them may equal read); -1: that one is not kept. K reaches
                    back to the first state that any row keeps
    pages_BN        int32, page ids of each row, left to right, padded with 0; they cover `lens` tokens
    windows_BN      int32, the same of window pages, 0 also where no query of the row sees them any more;
                    [B, 0] in a model without windows

    In `one_run` they are in this order: all that is not a table comes first.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    cu_B1: torch.Tensor
    lens_B: torch.Tensor
    read_B: torch.Tensor
    writes_BK: torch.Tensor
    pages_BN: torch.Tensor
    windows_BN: torch.Tensor

    @property
    def of_windows(self) -> "Inputs":
        """Return the same step for layers with a window: window pages replace the others."""
        return replace(self, pages_BN=self.windows_BN)


class Kept(NamedTuple):
    """The tokens of a step whose hidden states are read: the last ones of each row, at least one.

    tokens_K   int64, their indices in the step, ascending
    cu_B1      int32, row starts among them; cu[B] = K
    """

    tokens_K: torch.Tensor
    cu_B1: torch.Tensor

    def of(self, inputs: Inputs) -> Inputs:
        """Return the step for an operator that takes these tokens alone. `tokens_T` and `positions_T` stay
        those of all."""
        return replace(inputs, cu_B1=self.cu_B1)

    @classmethod
    def last(cls, cu_B1: torch.Tensor) -> "Kept":
        """Return the last token of each row. `cu_B1` (int32) are the rows' starts in the step."""
        starts_B1 = torch.arange(len(cu_B1), dtype=torch.int32, device=cu_B1.device)
        return cls(cu_B1[1:].long() - 1, starts_B1)

    def on(self, device: torch.device) -> "Kept":
        """Return it on `device`; the host does not wait for the copies."""
        parts = (part.pin_memory() if device.type == "cuda" else part for part in self)
        return Kept(*(part.to(device, non_blocking=True) for part in parts))


def one_run(
    like: Inputs, device: torch.device | None = None, *, pinned: bool = False
) -> tuple[torch.Tensor, Inputs]:
    """Return undefined memory (uint8 [bytes]) for all tensors of `like`, to be copied as one, and views of it
    with their shapes and dtypes."""
    tensors: dict[str, torch.Tensor] = {field.name: getattr(like, field.name) for field in fields(Inputs)}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    memory = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pinned)
    views = {
        name: memory[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
        for name, start in starts.items()
    }
    return memory, Inputs(**views)


def gathered(inputs: Inputs, *, pinned: bool) -> tuple[torch.Tensor, Inputs]:
    """Return `one_run` of host memory that holds the tensors of `inputs`."""
    memory, views = one_run(inputs, pinned=pinned)
    for field in fields(Inputs):
        getattr(views, field.name).copy_(getattr(inputs, field.name))
    return memory, views


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Return the inputs on `device`. To a device they go in one copy, which the current stream waits for and
    the host does not."""
    if device.type == "cpu":
        return inputs
    host_bytes, _ = gathered(inputs, pinned=True)
    device_bytes, moved = one_run(inputs, device)
    device_bytes.copy_(host_bytes, non_blocking=True)
    return moved


@dataclass(frozen=True, slots=True)
class Caches:
    """Strided views of one arena, one per layer of each kind, in layer order. All ids index dimension 0.
    `has_windows`: some of `kv` are of window pages.

    kv          [pages or window pages, kv_heads, 2, P, head_dim]  kv dtype, or FP8; index 2 is K, V
                [pages, 1, 1, P, width]                            ... of a layer that keeps latents
    conv        [states, key_heads, conv_width - 1, channels]      float32
    temporal    [states, key_heads, values_per_group, key_dim, value_dim]  state dtype
    saved       `conv`, then `temporal` of checkpoints, if they are a class of their own: [checkpoints, ..]
    slices      of each of `kv`, the slice of a page in which it is; of window pages 0
    arrivals    of pages that are fetched while a step reads them, for each slice
    """

    kv: tuple[Pages, ...]
    conv: tuple[torch.Tensor, ...]
    temporal: tuple[torch.Tensor, ...]
    has_windows: bool = False
    saved: tuple[torch.Tensor, ...] = ()
    slices: tuple[int, ...] = ()
    arrivals: Sequence[Sequence[Future[None]]] = ()

    def paged(self) -> Iterator[Pages]:
        """Yield `kv` layer by layer, each when its slice of all pages has arrived."""
        for layer, pages in enumerate(self.kv):
            for slices in self.arrivals:
                slices[self.slices[layer]].result()
            yield pages

    def save(self, states_N: torch.Tensor, checkpoints_N: torch.Tensor) -> None:
        """Copy states (int64, ids) to checkpoints."""
        for states, saved in zip((*self.conv, *self.temporal), self.saved, strict=True):
            saved[checkpoints_N] = states[states_N].to(saved.dtype)

    def restore(self, checkpoints_N: torch.Tensor, states_N: torch.Tensor) -> None:
        """Copy checkpoints (int64, ids) to states."""
        for states, saved in zip((*self.conv, *self.temporal), self.saved, strict=True):
            states[states_N] = saved[checkpoints_N].to(states.dtype)

    @property
    def plain_kv(self) -> list[torch.Tensor]:
        """The views whose numbers are stored as they are."""
        return [pages for pages in self.kv if not isinstance(pages, Fp8)]


def caches_of(layout: Layout, arena: torch.Tensor, kv_scales: Sequence[tuple[int, int]] = ()) -> Caches:
    """Return views of `arena` (uint8, a whole number of extents), as `layout` arranges pages and states in
    it. `kv_scales` are the bytes of scales of keys and values of each layer; empty: all 1."""
    assert arena.dtype == torch.uint8
    assert arena.numel() % layout.extent_bytes == 0
    kv: list[Pages] = []
    slices: list[int] = []
    conv, temporal = _states(layout, arena, layout.state_dtype, layout.state_stride_bytes)
    saved = _states(layout, arena, layout.checkpoint_dtype, layout.saved_stride_bytes)
    pages = _Pages(layout, arena, layout.slice_bytes, layout.attention or layout.latents)
    windows = _Pages(layout, arena, (layout.window_bytes,), layout.windows)
    for spec in layout.layers:
        match spec:
            case Attention():
                kv.append(pages.next(spec))
                slices.append(pages.slice)
            case Window():
                kv.append(windows.next(spec))
                slices.append(0)
            case Latent():
                kv.append(pages.next_latents(spec))
                slices.append(pages.slice)
            case Linear():
                pass  # see _states
            case _:
                assert_never(spec)
    if kv_scales:
        coded = [pages for pages in kv if isinstance(pages, Fp8)]
        kv = [fixed_scales(pages.codes, *pair) for pages, pair in zip(coded, kv_scales, strict=True)]
    copies = (*saved[0], *saved[1]) if layout.converts else ()
    return Caches(tuple(kv), tuple(conv), tuple(temporal), layout.has_windows, copies, slices=tuple(slices))


def _states(
    layout: Layout, arena: torch.Tensor, temporal_dtype: StateDtype, stride_bytes: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return views [states, groups, ..] of both parts of the states of each layer."""
    group_bytes = sum(layer.group_bytes(temporal_dtype) for layer in layout.linear)

    def part(offset_bytes: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        strides = [stride_bytes // dtype.itemsize, group_bytes // dtype.itemsize]
        strides += [prod(shape[dim + 1 :]) for dim in range(1, len(shape))]
        whole = (arena.numel() // stride_bytes, *shape)
        return arena.view(dtype).as_strided(whole, strides, offset_bytes // dtype.itemsize)

    conv: list[torch.Tensor] = []
    temporal: list[torch.Tensor] = []
    offset_bytes = 0
    for spec in layout.linear:
        shape = (spec.values_per_group, spec.key_dim, spec.value_dim)
        columns = (spec.conv_width - 1, spec.group_channels)
        conv.append(part(offset_bytes, torch.float32, spec.key_heads, *columns))
        offset_bytes += spec.conv_elements * WORD_BYTES
        temporal.append(part(offset_bytes, KV_DTYPES[temporal_dtype], spec.key_heads, *shape))
        offset_bytes += spec.temporal_bytes(temporal_dtype)
    return conv, temporal


class _Pages:
    """The views of one class of pages, layer by layer. `slice` is that of the last view."""

    def __init__(
        self,
        layout: Layout,
        arena: torch.Tensor,
        slice_bytes: Sequence[int],
        layers: Sequence[Attention | Window | Latent],
    ) -> None:
        self._format = KV_FORMATS[layout.kv_dtype]
        self._memory = arena.view(KV_DTYPES[layout.kv_dtype])
        self._tokens = layout.page_tokens
        self._sizes = [num_bytes // self._format.element_bytes for num_bytes in slice_bytes]
        self._slices = [
            number for number, some in enumerate(slices_of(len(layers), len(slice_bytes))) for _ in some
        ]
        self._views = 0
        self._offset = 0
        self.slice = 0

    def next(self, spec: Attention | Window) -> Pages:
        return self._view(spec.kv_heads, 2, spec.head_dim)

    def next_latents(self, spec: Latent) -> Pages:
        return self._view(1, 1, spec.width)

    def _plane(self, dim: int) -> int:
        """Return the elements of the tokens of a page in one head, keys or values, and of their scales."""
        return self._tokens * (dim + self._format.scale_bytes // self._format.element_bytes)

    def _view(self, heads: int, parts: int, dim: int) -> Pages:
        before, self.slice = self.slice, self._slices[self._views]
        self._views += 1
        if self.slice > before:
            self._offset = sum(self._sizes[: self.slice])
        plane, offset, size = self._plane(dim), self._offset, sum(self._sizes)
        shape = (self._memory.numel() // size, heads, parts, self._tokens)
        head_size = self._sizes[self.slice] // heads if parts > 1 else 0
        strides = (size, head_size, plane if parts > 1 else 0)
        self._offset += parts * plane
        view = self._memory.as_strided((*shape, dim), (*strides, dim, 1), offset)
        if self._memory.dtype != torch.uint8:
            return view
        if not self._format.scale_bytes:
            return fixed_scales(view)
        return Fp8(view, self._memory.as_strided(shape, (*strides, 1), offset + self._tokens * dim))
