# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The kernel of `route` on CUDA."""

import triton
import triton.language as tl

from tidemill.kernels.activation.cuda import sigmoid
from tidemill.kernels.shared.row_of import pads

LOWEST = tl.constexpr(-3.4e38)  # of what can be chosen: -inf is what cannot, or is already


@triton.jit
def in_kept_groups(choice_E, expert_E, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """Return whether an expert is in one of the KEPT groups whose two best have the highest sums."""
    GROUPS_2: tl.constexpr = triton.next_power_of_2(GROUPS)
    group_G = tl.arange(0, GROUPS_2)
    sum_G = tl.full([GROUPS_2], float("-inf"), tl.float32)
    for group in range(GROUPS):
        own_E = tl.where(expert_E // SIZE == group, choice_E, float("-inf"))
        first = tl.max(own_E, 0)
        second = tl.max(tl.where(expert_E == tl.argmax(own_E, 0), float("-inf"), own_E), 0)
        # Halves, so that two that are the lowest do not add up to what is not there.
        sum_G = tl.where(group_G == group, first * 0.5 + second * 0.5, sum_G)
    kept_E = tl.zeros(choice_E.shape, tl.int1)
    for _ in range(KEPT):
        best = tl.argmax(sum_G, 0)
        kept_E = kept_E | (expert_E // SIZE == best)
        sum_G = tl.where(group_G == best, float("-inf"), sum_G)
    return kept_E


@triton.jit
def choose_shared(
    gate, chosen, weights, is_padding, E: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr
) -> None:
    """Choose the SHARED experts after the others, with their weight."""
    share = 1.0
    if GATED:
        share = sigmoid(tl.load(gate).to(tl.float32))
    for i in tl.static_range(SHARED):
        tl.store(chosen + i, tl.where(is_padding, -1, E + i))
        tl.store(weights + i, tl.where(is_padding, 0.0, share))


@triton.jit
def choose(
    logits,  # float [T, E], or [T, E + 1] with a gate
    bias,  # float32 [E], or None
    chosen,  # int32 [T, K + SHARED]
    weights,  # float32 [T, K + SHARED]
    cu, lens,  # int32 [B + 1] and [B], or None: no token is padding
    rows, row_stride, scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    ONE_EACH: tl.constexpr,  # every row has one token
    BLOCK: tl.constexpr,  # power of two, at least E
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """One token. Ties go to the lower id; NaN is chosen last, so that ids are valid whatever the logits. The
    padding of a batch gets no expert."""
    token = tl.program_id(0).to(tl.int64)
    chosen += token * (K + SHARED)
    weights += token * (K + SHARED)
    is_padding = False
    if lens is not None:
        is_padding = pads(cu, lens, rows, token, ONE_EACH, ROWS)
    expert_E = tl.arange(0, BLOCK)
    logit_E = tl.load(logits + token * row_stride + expert_E, mask=expert_E < E, other=float("-inf"))
    logit_E = logit_E.to(tl.float32)
    left_E = tl.where(logit_E > LOWEST, logit_E, LOWEST)
    if SOFTMAX:
        share_E = tl.exp(logit_E - tl.max(tl.where(expert_E < E, left_E, LOWEST), 0))
        total = tl.sum(share_E, 0)
    else:
        share_E, total = sigmoid(logit_E), 1.0
    # Shares order the experts as their logits do, but for those that are too small to tell apart.
    if bias is not None or GROUPS > 1:
        left_E = share_E / total
        if bias is not None:
            left_E += tl.load(bias + expert_E, mask=expert_E < E, other=0.0)
        left_E = tl.where(left_E > LOWEST, left_E, LOWEST)
    left_E = tl.where(expert_E < E, left_E, float("-inf"))
    if GROUPS > 1:
        left_E = tl.where(in_kept_groups(left_E, expert_E, GROUPS, KEPT, E // GROUPS), left_E, float("-inf"))
    taken_E = tl.zeros([BLOCK], tl.int1)
    for _ in range(K):
        taken_E = taken_E | (expert_E == tl.argmax(left_E, 0))
        left_E = tl.where(taken_E, float("-inf"), left_E)
    kept_E = tl.where(taken_E, share_E, 0.0)
    if RENORMALISE:
        total = tl.sum(kept_E, 0) + 1e-20
    place_E = tl.cumsum(taken_E.to(tl.int32), 0) - 1
    tl.store(chosen + place_E, tl.where(is_padding, -1, expert_E), mask=taken_E)
    tl.store(weights + place_E, tl.where(is_padding, 0.0, kept_E / total * scale), mask=taken_E)
    if SHARED > 0:
        at_gate = logits + token * row_stride + E
        choose_shared(at_gate, chosen + K, weights + K, is_padding, E, SHARED, GATED)
