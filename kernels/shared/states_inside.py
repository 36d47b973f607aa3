# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The states inside the chunks of a recurrence on CUDA, for `gated_delta` and `mamba2`."""

import triton
import triton.language as tl

from tidemill.kernels.shared.recurrence import CHUNK, rounded


@triton.jit
def write_inside(
    S_KV,  # before the chunk
    k_CK, u_CV, scale_C, total_C, in_C,
    at_KV,  # addresses in state 0
    state_slot, in_KV, writes,
    first,  # the column of the chunk's first token in the row's `writes`
    kept,
    depth,  # of the state before the chunk
    ROUND: tl.constexpr,
):  # fmt: skip
    """Write the states after tokens of a chunk that are kept, but for the row's last:

        exp(total_t) S + sum over i <= t of exp(total_t - total_i) scale_i k_i u_i

    The chunk itself runs as if none was kept, so that what is kept changes no bit of an output.
    """
    place_C = tl.arange(0, CHUNK)
    column_C = first + place_C
    is_inside = in_C & (column_C >= 0) & (column_C < kept - 1)
    slot_C = tl.load(writes + column_C, mask=is_inside, other=-1)
    for _ in range(tl.sum((slot_C >= 0).to(tl.int32))):
        place = tl.min(tl.where(slot_C >= 0, place_C, CHUNK))
        slot = tl.max(tl.where(place_C == place, slot_C, -1)).to(tl.int64)
        slot_C = tl.where(place_C == place, -1, slot_C)
        total = tl.sum(tl.where(place_C == place, total_C, 0.0))
        is_past = place_C <= place
        left_C = scale_C * tl.exp(tl.where(is_past, total - total_C, 0.0).to(tl.float32))
        added_CV = (u_CV.to(tl.float32) * tl.where(is_past, left_C, 0.0)[:, None]).to(k_CK.dtype)
        S_t_KV = tl.dot(tl.trans(k_CK), added_CV, S_KV * tl.exp(total.to(tl.float32)), input_precision="ieee")
        S_t_KV = rounded(S_t_KV, depth + place + 1, ROUND)
        tl.store(at_KV + slot * state_slot, S_t_KV, mask=in_KV)
