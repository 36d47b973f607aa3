# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
# Nor has it types that pyright could check.
"""`draw`, `adjust` and `count` on CUDA, one launch each.

One program draws one row. It reads the row three times, or four times with filters: for the greatest score,
the whole weight, and the token. With filters it first copies the scores that the filters can leave, and then
searches thresholds among them alone. The weights are integers, so no order of sums matters.
"""

import torch
import triton
import triton.language as tl

from tidemill.kernels.draw.reference import POWERS
from tidemill.kernels.draw.tables import ONE, PROMPT, AdjustmentField, ChangeField, DrawField, ItemField

BLOCK = 4096
WARPS = 16
FAN = 8
"""The thresholds that one pass of a search compares."""

# ptxas would otherwise fuse products and sums, which the definition rounds one by one.
EXACT = {"enable_fp_fusion": False}

LOWEST = tl.constexpr(-64.0)
UNIT = tl.constexpr(ONE)
FLAG = tl.constexpr(PROMPT)
P1, P2, P3, P4, P5, P6, P7 = (tl.constexpr(power) for power in POWERS[1:])


@triton.jit
def clean(score):
    score = tl.where(score == score, score, float("-inf"))  # noqa: PLR0124 - NaN is not
    return tl.where(score == 0.0, 0.0, score)  # without a sign


@triton.jit
def power_of(score, top, scale):
    power = tl.where(score == top, 0.0, (score - top) * scale)
    return tl.maximum(power, LOWEST)


@triton.jit
def weight(power):
    whole = (power + 12582912.0) - 12582912.0
    part = power - whole
    part_sum = part * P7 + P6
    part_sum = part_sum * part + P5
    part_sum = part_sum * part + P4
    part_sum = part_sum * part + P3
    part_sum = part_sum * part + P2
    part_sum = part_sum * part + P1
    part_sum = part_sum * part + 1.0
    factor = ((whole.to(tl.int32) + (127 + 40)) << 23).to(tl.float32, bitcast=True)
    return (part_sum * factor).to(tl.int64)


@triton.jit
def key_of(score):
    """An integer that grows with the score."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def score_of(key):
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def target_of(uniform, mass):
    return tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def search(
    scores, size, top, scale, low, high, target, COUNTS: tl.constexpr, PART: tl.constexpr, FAN: tl.constexpr
):
    """Return the greatest key in `[low, high)` such that the mass of all scores from it on exceeds the
    target, and the mass above it. COUNTS: each score has mass 1."""
    at_B, fan_F = tl.arange(0, PART), tl.arange(0, FAN)
    above = low * 0
    while high - low > 1:
        step = (high - low + FAN) // (FAN + 1)
        keys_F = low + (fan_F + 1) * step
        mass_BF = tl.zeros([PART, FAN], tl.int64)
        start = 0
        while start < size:
            in_B = start + at_B < size
            score_B = tl.load(scores + start + at_B, mask=in_B, other=float("-inf"))
            mass_B = tl.full([PART], 1, tl.int64) if COUNTS else weight(power_of(score_B, top, scale))
            mass_B = tl.where(in_B, mass_B, 0)
            mass_BF += tl.where(key_of(score_B)[:, None] >= keys_F[None, :], mass_B[:, None], 0)
            start += PART
        mass_F = tl.sum(mass_BF, axis=0)
        passing = tl.sum((mass_F > target).to(tl.int64), axis=0)
        above = tl.maximum(above, tl.max(tl.where(mass_F > target, 0, mass_F), axis=0))
        high = tl.minimum(high, low + (passing + 1) * step)
        low += passing * step
    return low, above


@triton.jit
def greatest(row, vocabulary, BLOCK: tl.constexpr):
    """Return the greatest score, and its first token."""
    at_B = tl.arange(0, BLOCK)
    best_B = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at_B = at_B
    for start in range(0, vocabulary, BLOCK):
        score_B = clean(tl.load(row + start + at_B, mask=start + at_B < vocabulary, other=float("-inf")))
        better_B = score_B > best_B
        best_B = tl.where(better_B, score_B, best_B)
        best_at_B = tl.where(better_B, start + at_B, best_at_B)
    top = tl.max(best_B, axis=0)
    return top, tl.min(tl.where(best_B == top, best_at_B, vocabulary), axis=0)


@triton.jit
def mass_of(scores, size, top, scale, least, beyond, BLOCK: tl.constexpr):
    """Return the mass of the scores with at least the weight `least` and with keys beyond a key."""
    at_B = tl.arange(0, BLOCK)
    mass = tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        in_B = start + at_B < size
        score_B = clean(tl.load(scores + start + at_B, mask=in_B, other=float("-inf")))
        mass_B = weight(power_of(score_B, top, scale))
        in_B &= (mass_B >= least) & (key_of(score_B) > beyond)
        mass += tl.sum(tl.where(in_B, mass_B, 0), axis=0)
    return mass


@triton.jit
def bounds(row, vocabulary, top, scale, top_k, top_p, least, PART: tl.constexpr, FAN: tl.constexpr):
    """Return a power of two such that the filters drop every score below it, and the mass that top-p fills:
    that of all and one without it."""
    # Masses and counts of scores from a power of two on: the last one has all of them.
    level_F = tl.minimum(1 << tl.arange(0, FAN), 64)
    mass_PF = tl.zeros([PART, FAN], tl.int64)
    count_PF = tl.zeros([PART, FAN], tl.int32)
    at_P = tl.arange(0, PART)
    for start in range(0, vocabulary, PART):
        in_P = start + at_P < vocabulary
        score_P = clean(tl.load(row + start + at_P, mask=in_P, other=float("-inf")))
        power_P = power_of(score_P, top, scale)
        mass_P = tl.where(in_P, weight(power_P), 0)
        at_least_PF = power_P[:, None] >= -level_F.to(tl.float32)[None, :]
        mass_PF += tl.where(at_least_PF, mass_P[:, None], 0)
        count_PF += (at_least_PF & in_P[:, None]).to(tl.int32)
    mass_F = tl.sum(mass_PF, axis=0)
    count_F = tl.sum(count_PF, axis=0).to(tl.int64)
    total = tl.max(mass_F, axis=0)
    exact = top_p * total.to(tl.float64)
    share = exact.to(tl.int64)
    share += (share.to(tl.float64) < exact).to(tl.int64)
    share = tl.where(top_p < 1, tl.maximum(share, 1), total + 1)
    decided_F = (mass_F >= share) | (count_F >= top_k) | (level_F == 64)
    decided_F |= (UNIT >> tl.minimum(level_F, 41).to(tl.int64)) < least
    return -tl.min(tl.where(decided_F, level_F, 64), axis=0).to(tl.float32), share


@triton.jit
def copy_above(row, vocabulary, room, top, scale, level, BLOCK: tl.constexpr):
    """Copy the scores from a power of two on. Return their number, and the least key among them."""
    at_B = tl.arange(0, BLOCK)
    size = tl.zeros([], tl.int32)
    lowest_B = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        in_B = start + at_B < vocabulary
        score_B = clean(tl.load(row + start + at_B, mask=in_B, other=float("-inf")))
        in_B &= power_of(score_B, top, scale) >= level
        slot_B = size + tl.cumsum(in_B.to(tl.int32), axis=0) - 1
        tl.store(room + slot_B, score_B, mask=in_B)
        lowest_B = tl.where(in_B, tl.minimum(lowest_B, score_B), lowest_B)
        size += tl.sum(in_B.to(tl.int32), axis=0)
    tl.debug_barrier()
    return size, key_of(tl.min(lowest_B, axis=0))


@triton.jit
def kept_mass(
    scores, size, top, scale, low, high, top_k, share, least,
    BLOCK: tl.constexpr, PART: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """Return the mass of what all filters leave."""
    mass = mass_of(scores, size, top, scale, least, low - 1, BLOCK)
    if top_k < size:
        key, count = search(scores, size, top, scale, low, high, top_k - 1, COUNTS=True, PART=PART, FAN=FAN)
        each = weight(power_of(score_of(key), top, scale))
        mass = tl.minimum(mass, mass_of(scores, size, top, scale, 0, key, BLOCK) + (top_k - count) * each)
    if share <= mass_of(scores, size, top, scale, 0, low - 1, BLOCK):
        key, above = search(scores, size, top, scale, low, high, share - 1, COUNTS=False, PART=PART, FAN=FAN)
        each = weight(power_of(score_of(key), top, scale))
        mass = tl.minimum(mass, above + (share - above + each - 1) // each * each)
    return tl.maximum(mass, UNIT)


@triton.jit
def token_at(row, vocabulary, top, scale, by_key, key, nth, BLOCK: tl.constexpr):
    """Return the first token at which the sum exceeds `nth`: of weights, or of scores with a key."""
    at_B = tl.arange(0, BLOCK)
    token = vocabulary
    seen = tl.zeros([], tl.int64)
    start = 0
    while (token == vocabulary) & (start < vocabulary):
        in_B = start + at_B < vocabulary
        score_B = clean(tl.load(row + start + at_B, mask=in_B, other=float("-inf")))
        mass_B = weight(power_of(score_B, top, scale))
        if by_key:
            mass_B = (key_of(score_B) == key).to(tl.int64)
        sum_B = seen + tl.cumsum(tl.where(in_B, mass_B, 0), axis=0)
        token = tl.min(tl.where(in_B & (sum_B > nth), start + at_B, vocabulary), axis=0)
        seen = tl.max(sum_B, axis=0)
        start += BLOCK
    return token


@triton.jit(do_not_specialize=["vocabulary", "logits_row"])
def draw_row(
    logits, logits_row, adjusted, vocabulary, draws, room, tokens,
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    ROOM: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # of the loops that compare FAN numbers
    FAN: tl.constexpr,
) -> None:  # fmt: skip
    """Draw i of a grid (i)."""
    entry = draws + tl.program_id(0) * FIELDS
    source = tl.load(entry + SOURCE).to(tl.int64)
    scale = tl.load(entry + SCALE).to(tl.float32)
    uniform = tl.load(entry + UNIFORM)
    own = tl.load(entry + ROOM).to(tl.int64)
    row = logits + source * logits_row
    if source < 0:
        row = adjusted + (-1 - source) * vocabulary
    top, token = greatest(row, vocabulary, BLOCK)
    if scale > 0:
        high = key_of(top) + 1
        key = high * 0
        nth = high * 0
        if own < 0:
            nth = target_of(uniform, mass_of(row, vocabulary, top, scale, 0, -(1 << 40), BLOCK))
        else:
            room += own * vocabulary
            least = tl.maximum(tl.load(entry + LEAST).to(tl.int64), 1)
            top_k = tl.load(entry + TOP_K).to(tl.int64)
            top_k = tl.where(top_k > 0, top_k, vocabulary + 1)
            top_p = tl.load(entry + TOP_P)
            level, share = bounds(row, vocabulary, top, scale, top_k, top_p, least, PART, FAN)
            size, low = copy_above(row, vocabulary, room, top, scale, level, BLOCK)
            mass = kept_mass(room, size, top, scale, low, high, top_k, share, least, BLOCK, PART, FAN)
            nth = target_of(uniform, mass)
            key, above = search(room, size, top, scale, low, high, nth, COUNTS=False, PART=PART, FAN=FAN)
            nth = (nth - above) // weight(power_of(score_of(key), top, scale))
        token = token_at(row, vocabulary, top, scale, own >= 0, key, nth, BLOCK)
    tl.store(tokens + tl.program_id(0), token.to(tl.int64))


@triton.jit(do_not_specialize=["vocabulary", "logits_row", "words"])
def adjust_part(
    logits, logits_row, counts, masks, words, vocabulary, rows, items, scores,
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, SLOT: tl.constexpr, REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, MASK: tl.constexpr, BEGIN: tl.constexpr,
    END: tl.constexpr, ITEM_FIELDS: tl.constexpr, TOKEN: tl.constexpr, MORE: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Row i, part j of a grid (i, j)."""
    row = rows + tl.program_id(0) * FIELDS
    source = tl.load(row + SOURCE).to(tl.int64)
    slot = tl.load(row + SLOT).to(tl.int64)
    mask_row = tl.load(row + MASK).to(tl.int64)
    repetition = tl.load(row + REPETITION).to(tl.float32)
    presence = tl.load(row + PRESENCE).to(tl.float32)
    frequency = tl.load(row + FREQUENCY).to(tl.float32)
    inverse = tl.div_rn(1.0, repetition)
    start = tl.program_id(1) * BLOCK
    at_B = start + tl.arange(0, BLOCK)
    in_B = at_B < vocabulary
    score_B = tl.load(logits + source * logits_row + at_B, mask=in_B, other=0.0)
    count_B = tl.load(counts + slot * vocabulary + at_B, mask=in_B & (slot >= 0), other=0)
    shift_B = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(row + BEGIN).to(tl.int32), tl.load(row + END).to(tl.int32)):
        item = items + index * ITEM_FIELDS
        token = tl.load(item + TOKEN).to(tl.int32)
        if (token >= start) & (token < start + BLOCK):
            count_B += tl.where(at_B == token, tl.load(item + MORE).to(tl.int32), 0)
            shift_B = tl.where(at_B == token, tl.load(item + SHIFT).to(tl.float32), shift_B)
    times_B = count_B & (FLAG - 1)
    repeated_B = tl.where(score_B > 0, score_B * inverse, score_B * repetition)
    score_B = tl.where(count_B != 0, repeated_B, score_B)
    score_B = score_B - frequency * times_B.to(tl.float32)
    score_B = score_B - presence * (times_B > 0).to(tl.float32)
    score_B = score_B + shift_B
    in_mask_B = in_B & (mask_row >= 0)
    word_B = tl.load(masks + mask_row * words + at_B // 32, mask=in_mask_B, other=-1)
    score_B = tl.where((word_B >> (at_B % 32)) & 1 == 1, score_B, float("-inf"))
    tl.store(scores + tl.program_id(0).to(tl.int64) * vocabulary + at_B, score_B, mask=in_B)


@triton.jit(do_not_specialize=["vocabulary"])
def count_change(
    counts, vocabulary, changes,
    FIELDS: tl.constexpr, SLOT: tl.constexpr, TOKEN: tl.constexpr, BY: tl.constexpr,
) -> None:  # fmt: skip
    """Change i of a grid (i)."""
    change = changes + tl.program_id(0) * FIELDS
    slot, token = tl.load(change + SLOT).to(tl.int64), tl.load(change + TOKEN).to(tl.int64)
    tl.atomic_add(counts + slot * vocabulary + token, tl.load(change + BY).to(tl.int32))


def draw(
    logits_RV: torch.Tensor, scores_MV: torch.Tensor, draws_NF: torch.Tensor, filtered: int
) -> torch.Tensor:
    vocabulary = logits_RV.shape[1]
    assert logits_RV.dtype == scores_MV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    tokens_N = torch.empty(len(draws_NF), dtype=torch.int64, device=logits_RV.device)
    if len(draws_NF):
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        draw_row[(len(draws_NF),)](
            logits_RV, logits_RV.stride(0), scores_MV, vocabulary, draws_NF,
            logits_RV.new_empty(filtered, vocabulary), tokens_N,
            FIELDS=len(DrawField), **{field.name: int(field) for field in DrawField},
            BLOCK=block, PART=min(block, BLOCK // 4), FAN=FAN, num_warps=WARPS, **EXACT,
        )  # fmt: skip
    return tokens_N


def adjust(
    logits_RV: torch.Tensor,
    counts_SV: torch.Tensor,
    masks_GW: torch.Tensor,
    rows_MF: torch.Tensor,
    items_IF: torch.Tensor,
) -> torch.Tensor:
    vocabulary = logits_RV.shape[1]
    assert logits_RV.stride(1) == 1
    scores_MV = logits_RV.new_empty(len(rows_MF), vocabulary)
    if len(rows_MF):
        block = min(BLOCK // 2, triton.next_power_of_2(vocabulary))
        adjust_part[(len(rows_MF), triton.cdiv(vocabulary, block))](
            logits_RV, logits_RV.stride(0), counts_SV, masks_GW, masks_GW.shape[1], vocabulary, rows_MF,
            items_IF, scores_MV,
            FIELDS=len(AdjustmentField), **{field.name: int(field) for field in AdjustmentField},
            ITEM_FIELDS=len(ItemField), **{field.name: int(field) for field in ItemField},
            BLOCK=block, **EXACT,
        )  # fmt: skip
    return scores_MV


def count(counts_SV: torch.Tensor, changes_CF: torch.Tensor) -> None:
    if len(changes_CF):
        count_change[(len(changes_CF),)](
            counts_SV, counts_SV.shape[1], changes_CF,
            FIELDS=len(ChangeField), **{field.name: int(field) for field in ChangeField},
        )  # fmt: skip
