# pyrefly: ignore-errors[bad-argument-type, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`adjust` and `count` on CUDA, one launch each, and `draw`, three launches, or four with filters.

A row of scores is cut into parts, each read by a program of its own: for its greatest score, for its weight,
and with filters to copy the scores that these can leave. The last launch has a program for each draw. It
looks into one part for the token, and searches thresholds among what was copied. The weights are integers, so
no order of sums matters.
"""

import torch
import triton
import triton.language as tl

from tidemill.kernels.draw.reference import POWERS
from tidemill.kernels.draw.tables import ONE, PROMPT, AdjustmentField, ChangeField, DrawField, ItemField

BLOCK = 4096
"""The tokens of a part."""

WARPS, WARPS_OF_PART = 16, 8
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
def row_of(logits, logits_row, adjusted, vocabulary, source):
    """Return the scores of a draw."""
    row = logits + source * logits_row
    if source < 0:
        row = adjusted + (-1 - source) * vocabulary
    return row


@triton.jit
def top_of(tops, draw, parts, PARTS: tl.constexpr):
    """Return the greatest score of each part."""
    part_P = tl.arange(0, PARTS)
    return tl.load(tops + draw * parts + part_P, mask=part_P < parts, other=float("-inf"))


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
def cut_of(
    masses, counts, entry, draw, parts, vocabulary,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """Return a power of two such that the filters drop every score below it, how many each part has of the
    others, and the filters: top-k, the mass that top-p fills (that of all and one without it), and the least
    weight."""
    least = tl.maximum(tl.load(entry + LEAST).to(tl.int64), 1)
    top_k = tl.load(entry + TOP_K).to(tl.int64)
    top_k = tl.where(top_k > 0, top_k, vocabulary + 1)
    top_p = tl.load(entry + TOP_P)
    part_P, fan_F = tl.arange(0, PARTS), tl.arange(0, FAN)
    at_PF = (draw * parts + part_P)[:, None] * FAN + fan_F[None, :]
    mass_PF = tl.load(masses + at_PF, mask=(part_P < parts)[:, None], other=0)
    count_PF = tl.load(counts + at_PF, mask=(part_P < parts)[:, None], other=0).to(tl.int64)
    mass_F, count_F = tl.sum(mass_PF, axis=0), tl.sum(count_PF, axis=0)
    total = tl.max(mass_F, axis=0)
    exact = top_p * total.to(tl.float64)
    share = exact.to(tl.int64)
    share += (share.to(tl.float64) < exact).to(tl.int64)
    share = tl.where(top_p < 1, tl.maximum(share, 1), total + 1)
    level_F = tl.minimum(1 << fan_F, 64)
    decided_F = (mass_F >= share) | (count_F >= top_k) | (level_F == 64)
    decided_F |= (UNIT >> tl.minimum(level_F, 41).to(tl.int64)) < least
    first = tl.min(tl.where(decided_F, fan_F, FAN - 1), axis=0)
    count_P = tl.sum(tl.where((fan_F == first)[None, :], count_PF, 0), axis=1)
    return -tl.minimum(1 << first, 64).to(tl.float32), count_P, top_k, share, least


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
def slot_at(room, size, key, nth, BLOCK: tl.constexpr):
    """Return the place of score `nth` of those with a key."""
    at_B = tl.arange(0, BLOCK)
    slot = size
    seen = tl.zeros([], tl.int64)
    start = size * 0
    while (slot == size) & (start < size):
        score_B = tl.load(room + start + at_B, mask=start + at_B < size, other=0.0)
        is_B = (start + at_B < size) & (key_of(score_B) == key)
        sum_B = seen + tl.cumsum(is_B.to(tl.int64), axis=0)
        slot = tl.min(tl.where(is_B & (sum_B > nth), start + at_B, size), axis=0)
        seen = tl.max(sum_B, axis=0)
        start += BLOCK
    return slot


@triton.jit(do_not_specialize=["vocabulary", "logits_row"])
def top_of_part(
    logits, logits_row, adjusted, vocabulary, draws, tops, firsts,
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the greatest score of part j for draw i, of a grid (i, j), and its first token."""
    draw, part = tl.program_id(0), tl.program_id(1)
    row = row_of(
        logits, logits_row, adjusted, vocabulary, tl.load(draws + draw * FIELDS + SOURCE).to(tl.int64)
    )
    at_B = part * BLOCK + tl.arange(0, BLOCK)
    score_B = clean(tl.load(row + at_B, mask=at_B < vocabulary, other=float("-inf")))
    top = tl.max(score_B, axis=0)
    to = draw * tl.num_programs(1) + part
    tl.store(tops + to, top)
    tl.store(firsts + to, tl.min(tl.where(score_B == top, at_B, vocabulary), axis=0))


@triton.jit(do_not_specialize=["vocabulary", "logits_row"])
def weigh_part(
    logits, logits_row, adjusted, vocabulary, draws, tops, masses, counts,
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, SCALE: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # of the loops that compare FAN numbers
    PARTS: tl.constexpr,
    FAN: tl.constexpr,
) -> None:  # fmt: skip
    """Store the mass of part j for draw i, of a grid (i, j); with filters, masses and numbers of its scores
    from each power of two on, the last of all."""
    draw, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry = draws + draw * FIELDS
    scale = tl.load(entry + SCALE).to(tl.float32)
    if scale > 0:
        row = row_of(logits, logits_row, adjusted, vocabulary, tl.load(entry + SOURCE).to(tl.int64))
        top = tl.max(top_of(tops, draw, parts, PARTS), axis=0)
        to = (draw * parts + part) * FAN
        if tl.load(entry + ROOM) < 0:
            at_B = part * BLOCK + tl.arange(0, BLOCK)
            score_B = clean(tl.load(row + at_B, mask=at_B < vocabulary, other=float("-inf")))
            mass_B = tl.where(at_B < vocabulary, weight(power_of(score_B, top, scale)), 0)
            tl.store(masses + to + FAN - 1, tl.sum(mass_B, axis=0))
        else:
            fan_F = tl.arange(0, FAN)
            level_F = -tl.minimum(1 << fan_F, 64).to(tl.float32)
            mass_PF = tl.zeros([PART, FAN], tl.int64)
            count_PF = tl.zeros([PART, FAN], tl.int32)
            for start in range(0, BLOCK, PART):
                at_P = part * BLOCK + start + tl.arange(0, PART)
                score_P = clean(tl.load(row + at_P, mask=at_P < vocabulary, other=float("-inf")))
                power_P = power_of(score_P, top, scale)
                is_from_PF = (power_P[:, None] >= level_F[None, :]) & (at_P < vocabulary)[:, None]
                mass_PF += tl.where(is_from_PF, weight(power_P)[:, None], 0)
                count_PF += is_from_PF.to(tl.int32)
            tl.store(masses + to + fan_F, tl.sum(mass_PF, axis=0))
            tl.store(counts + to + fan_F, tl.sum(count_PF, axis=0))


@triton.jit(do_not_specialize=["vocabulary", "logits_row"])
def copy_part(
    logits, logits_row, adjusted, vocabulary, draws, tops, masses, counts,
    room,  # [filtered, V]
    lowest,  # [N, parts]
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, SCALE: tl.constexpr, ROOM: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FAN: tl.constexpr,
) -> None:  # fmt: skip
    """Copy those scores of part j that the filters of draw i can leave, of a grid (i, j), behind those of
    the parts before it. Store the lowest of them."""
    draw, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    entry = draws + draw * FIELDS
    own = tl.load(entry + ROOM).to(tl.int64)
    if own >= 0:
        row = row_of(logits, logits_row, adjusted, vocabulary, tl.load(entry + SOURCE).to(tl.int64))
        scale = tl.load(entry + SCALE).to(tl.float32)
        top = tl.max(top_of(tops, draw, parts, PARTS), axis=0)
        level, count_P, _, _, _ = cut_of(
            masses, counts, entry, draw, parts, vocabulary, TOP_K, TOP_P, LEAST, PARTS, FAN
        )
        before = tl.sum(tl.where(tl.arange(0, PARTS) < part, count_P, 0), axis=0)
        at_B = part * BLOCK + tl.arange(0, BLOCK)
        score_B = clean(tl.load(row + at_B, mask=at_B < vocabulary, other=float("-inf")))
        is_B = (at_B < vocabulary) & (power_of(score_B, top, scale) >= level)
        slot_B = tl.cumsum(is_B.to(tl.int32), axis=0) - 1
        tl.store(room + own * vocabulary + before + slot_B, score_B, mask=is_B)
        least = tl.min(tl.where(is_B, score_B, float("inf")), axis=0)
        tl.store(lowest + draw * parts + part, least)


@triton.jit(do_not_specialize=["vocabulary", "logits_row", "parts"])
def draw_token(
    logits, logits_row, adjusted, vocabulary, draws, tops, masses, counts, room, lowest, firsts,
    tokens,  # [N]
    parts,
    FIELDS: tl.constexpr, SOURCE: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    ROOM: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, FAN: tl.constexpr,
) -> None:  # fmt: skip
    """Draw i of a grid (i)."""
    draw, part_P = tl.program_id(0), tl.arange(0, PARTS)
    entry = draws + draw * FIELDS
    scale = tl.load(entry + SCALE).to(tl.float32)
    top_P = top_of(tops, draw, parts, PARTS)
    top = tl.max(top_P, axis=0)
    first_P = tl.load(firsts + draw * parts + part_P, mask=part_P < parts, other=vocabulary)
    token = tl.min(tl.where(top_P == top, first_P, vocabulary), axis=0)
    if scale > 0:
        uniform = tl.load(entry + UNIFORM)
        own = tl.load(entry + ROOM).to(tl.int64)
        at_P = (draw * parts + part_P) * FAN + FAN - 1
        # What each part has, of which the token is number `nth`: mass, or scores that were copied.
        size_P = tl.load(masses + at_P, mask=(part_P < parts) & (own < 0), other=0)
        level = LOWEST + 0.0
        if own < 0:
            nth = target_of(uniform, tl.sum(size_P, axis=0))
        else:
            level, size_P, top_k, share, least = cut_of(
                masses, counts, entry, draw, parts, vocabulary, TOP_K, TOP_P, LEAST, PARTS, FAN
            )
            room += own * vocabulary
            size = tl.sum(size_P, axis=0).to(tl.int32)
            lowest_P = tl.load(lowest + draw * parts + part_P, mask=part_P < parts, other=float("inf"))
            low, high = key_of(tl.min(lowest_P, axis=0)), key_of(top) + 1
            mass = kept_mass(room, size, top, scale, low, high, top_k, share, least, BLOCK, PART, FAN)
            nth = target_of(uniform, mass)
            key, above = search(room, size, top, scale, low, high, nth, COUNTS=False, PART=PART, FAN=FAN)
            nth = (nth - above) // weight(power_of(score_of(key), top, scale))
            nth = slot_at(room, size, key, nth, BLOCK).to(tl.int64)
        part = tl.sum((tl.cumsum(size_P, axis=0) <= nth).to(tl.int32), axis=0)
        nth -= tl.sum(tl.where(part_P < part, size_P, 0), axis=0)
        row = row_of(logits, logits_row, adjusted, vocabulary, tl.load(entry + SOURCE).to(tl.int64))
        at_B = part * BLOCK + tl.arange(0, BLOCK)
        score_B = clean(tl.load(row + at_B, mask=at_B < vocabulary, other=float("-inf")))
        power_B = power_of(score_B, top, scale)
        each_B = weight(power_B)
        if own >= 0:
            each_B = (power_B >= level).to(tl.int64)
        sum_B = tl.cumsum(tl.where(at_B < vocabulary, each_B, 0), axis=0)
        token = tl.min(tl.where((at_B < vocabulary) & (sum_B > nth), at_B, vocabulary), axis=0)
    tl.store(tokens + draw, token.to(tl.int64))


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
    num_draws, device = len(draws_NF), logits_RV.device
    tokens_N = torch.empty(num_draws, dtype=torch.int64, device=device)
    if not num_draws:
        return tokens_N
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, block)
    tops_NP, lowest_NP = (torch.empty(num_draws, parts, device=device) for _ in range(2))
    firsts_NP = torch.empty(num_draws, parts, dtype=torch.int32, device=device)
    masses_NPF = torch.empty(num_draws, parts, FAN, dtype=torch.int64, device=device)
    counts_NPF = torch.empty(num_draws, parts, FAN, dtype=torch.int32, device=device)
    room_KV = logits_RV.new_empty(filtered, vocabulary)
    rows = logits_RV, logits_RV.stride(0), scores_MV, vocabulary, draws_NF
    fields = {field.name: int(field) for field in DrawField}
    filters = {name: fields[name] for name in ("TOP_K", "TOP_P", "LEAST")}
    common = {"FIELDS": len(DrawField), "SOURCE": fields["SOURCE"], "BLOCK": block, **EXACT}
    sizes = {"SCALE": fields["SCALE"], "ROOM": fields["ROOM"], "FAN": FAN}
    sizes |= {"PARTS": triton.next_power_of_2(parts), **common}
    part, grid = min(block, BLOCK // 4), (num_draws, parts)
    top_of_part[grid](*rows, tops_NP, firsts_NP, num_warps=WARPS_OF_PART, **common)
    weighed = tops_NP, masses_NPF, counts_NPF
    weigh_part[grid](*rows, *weighed, PART=part, num_warps=WARPS_OF_PART, **sizes)
    if filtered:
        copy_part[grid](*rows, *weighed, room_KV, lowest_NP, num_warps=WARPS_OF_PART, **filters, **sizes)
    draw_token[(num_draws,)](
        *rows, *weighed, room_KV, lowest_NP, firsts_NP, tokens_N, parts,
        UNIFORM=fields["UNIFORM"], PART=part, num_warps=WARPS, **filters, **sizes,
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
