"""The definition of `causal_conv`: depthwise causal convolution with silu, its window kept in a state."""

import torch
from torch.nn import functional

from tidemill.kernels.shared.rows import Rows, integers, slots_after


def causal_conv(
    x_TGC: torch.Tensor,
    weight_WGC: torch.Tensor,
    bias_GC: torch.Tensor | None,
    state_SGWC: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """y[t] = silu(bias + sum over j of weight[j] * x[t - W + 1 + j]) for every channel, `[T, G, C]`.

    state_SGWC  [states, G, W - 1, C], the inputs before the row, oldest first, read at `rows.read_B`
                (-1: zeros); the slots of `rows.writes_BK` then receive the W - 1 inputs up to their token
    """
    y_TGC = torch.empty_like(x_TGC, memory_format=torch.contiguous_format)
    width = len(weight_WGC)
    starts, slots = integers(rows.cu_B1), slots_after(rows)
    for b, read in enumerate(integers(rows.read_B)):
        window = state_SGWC[read] if read >= 0 else torch.zeros_like(state_SGWC[0])
        inputs_NGC = torch.cat([window.transpose(0, 1), x_TGC[starts[b] : starts[b + 1]]])
        taps_NGCW = inputs_NGC.unfold(0, width, 1)
        sum_NGC = (taps_NGCW * weight_WGC.permute(1, 2, 0)).sum(-1)
        sum_NGC = sum_NGC if bias_GC is None else sum_NGC + bias_GC
        y_TGC[starts[b] : starts[b + 1]] = functional.silu(sum_NGC)
        for n in range(1, starts[b + 1] - starts[b] + 1):
            slot = slots.get(starts[b] + n - 1)
            if slot is not None:
                state_SGWC[slot] = inputs_NGC[n : n + width - 1].transpose(0, 1)
    return y_TGC
