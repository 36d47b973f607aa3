"""`attention` by FlashInfer, which reads our pages as they are: the keys and the values of a layer are views
`[pages, kv_heads, P, D]` with strides of their own.

Rows of one token and of many run the same kernels, those for prompts, which multiply on matrix units. The
host plans each step once for all layers of a window, so a step waits for its own tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tidemill.kernels.shared.build import KernelUnavailable
from tidemill.kernels.shared.fp8 import Fp8, Pages
from tidemill.kernels.shared.rows import Made, Rows

HEAD_DIMS = (64, 128, 256)
STRIDE_MAX = 1 << 32
"""FlashInfer keeps strides, in elements, in 32 bits."""

WORKSPACE_BYTES = 128 << 20


class Tables(NamedTuple):
    """The tables of a step in FlashInfer's words, int32. Indices lie on the device of the rows, all else on
    the host.

    Row b has the pages `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`, the last with `last_page_len` tokens.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


def tables_of(rows: Rows, page_tokens: int, window: int | None) -> Tables:
    """Return the tables without the pages of which no query of a row sees a token: they may hold NaN."""
    cu_B1, lens_B, pages_BN = rows.cu_B1.cpu(), rows.lens_B.cpu(), rows.pages_BN.cpu()
    first_B = torch.zeros_like(lens_B)
    if window is not None:
        first_B = (lens_B - cu_B1.diff() - window + 1).clamp(min=0) // page_tokens
    end_B = -(-lens_B // page_tokens)
    column_N = torch.arange(pages_BN.shape[1])
    seen_BN = (column_N >= first_B[:, None]) & (column_N < end_B[:, None])
    return Tables(
        cu_B1,
        torch.nn.functional.pad(seen_BN.sum(1).cumsum(0), (1, 0)).int(),
        pages_BN[seen_BN].to(rows.pages_BN.device),
        (lens_B - 1) % page_tokens + 1,
    )


def check(dim: int, cache: Pages, sinks_H: Tensor | None) -> Tensor:
    """Return pages that FlashInfer reads. Raises KernelUnavailable."""
    if isinstance(cache, Fp8) or cache.dtype != torch.bfloat16:
        found = "FP8" if isinstance(cache, Fp8) else str(cache.dtype).removeprefix("torch.")
        raise _refused(f"pages in bfloat16, not {found}: set --kv-cache-dtype bfloat16")
    if cache.shape[2] == 1:
        raise _refused("keys beside values, and this model has latents")
    if dim not in HEAD_DIMS:
        raise _refused(f"heads of 64, 128 or 256, and this model's have {dim}")
    if sinks_H is not None:
        raise _refused("no attention sinks, and this model has them")
    if cache.stride(4) != 1 or max(cache.stride()) >= STRIDE_MAX:
        raise _refused(f"strides below 2^32 elements, and pages have {cache.stride()}: lower --page-size")
    return cache


def _refused(takes: str) -> KernelUnavailable:
    return KernelUnavailable(f"--attention-backend flashinfer takes {takes}; or leave the option out")


@dataclass(slots=True)
class FlashInfer:
    """The wrappers by all that a plan depends on, some planned for the newest step. `wrap` makes another."""

    wrap: Callable[[torch.device], Any]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    _wrappers: dict[object, Any] = field(default_factory=dict[object, Any])
    _planned: set[object] = field(default_factory=set[object])
    _step: Made | None = None

    def attention(
        self,
        q_THD: Tensor,
        cache: Pages,
        rows: Rows,
        window: int | None,
        sinks_H: Tensor | None,
        made: Made | None = None,
    ) -> Tensor:
        """Attend as the reference does, in bfloat16, with float32 sums. Rows of padding are undefined. Raises
        KernelUnavailable."""
        pages = check(q_THD.shape[2], cache, sinks_H)
        if made is None or made is not self._step:
            self._step = made
            self._planned.clear()
        _, kv_heads, _, page_tokens, dim = pages.shape
        plan = q_THD.device, q_THD.shape[1], kv_heads, dim, page_tokens
        key = *plan, window
        if key not in self._wrappers:
            self._wrappers[key] = self.wrap(q_THD.device)
        if key not in self._planned:
            self._wrappers[key].plan(
                *tables_of(rows, page_tokens, window),
                *plan[1:],
                causal=True,
                window_left=-1 if window is None else window - 1,
                sm_scale=dim**-0.5,
                q_data_type=pages.dtype,
                kv_data_type=pages.dtype,
            )
            self._planned.add(key)
        found = self._wrappers[key].run(q_THD.to(pages.dtype), (pages[:, :, 0], pages[:, :, 1]))
        return found.to(q_THD.dtype)

    def gated_attention(
        self,
        q_THD: Tensor,
        cache: Pages,
        rows: Rows,
        window: int | None,
        sinks_H: Tensor | None,
        gate_THD: Tensor,
        made: Made | None = None,
    ) -> Tensor:
        """Return `sigmoid_mul` of `attention` and the gate."""
        return self.sigmoid_mul(self.attention(q_THD, cache, rows, window, sinks_H, made), gate_THD)


def installed(sigmoid_mul: Callable[[Tensor, Tensor], Tensor]) -> FlashInfer:
    """Return the operator over the installed library, with a workspace for each device. Raises
    KernelUnavailable."""
    try:
        library: Any = import_module("flashinfer")
    except ImportError as error:
        raise KernelUnavailable(
            f"--attention-backend flashinfer: {error}: pip install flashinfer-python, or leave the option out"
        ) from error
    workspaces: dict[torch.device, Tensor] = {}

    def wrap(device: torch.device) -> Any:  # noqa: ANN401 - the library has no types
        if device not in workspaces:
            workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return library.BatchPrefillWithPagedKVCacheWrapper(workspaces[device], "HND")

    return FlashInfer(wrap, sigmoid_mul)
