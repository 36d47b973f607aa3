"""The definition of `draw`, `adjust` and `count`.

All numbers are float32 without fused operations, and weights are integers. Sums of integers do not depend on
their order: every variant draws the same token from the same scores.
"""

from math import ceil, log
from typing import Any, cast

import torch

from tidemill.kernels.draw.tables import ONE, PROMPT, AdjustmentField, DrawField, ItemField

EXPONENT_MIN = -64.0
"""Lower powers of two have no weight."""

ROUNDING = 12582912.0
"""1.5 * 2^23: the sum with it is rounded to an integer."""

POWERS = tuple(log(2) ** k / factorial for k, factorial in enumerate((1, 1, 2, 6, 24, 120, 720, 5040)))
"""The Taylor series of 2^x, good to 1e-8 for |x| <= 1/2."""


def draw(
    logits_RV: torch.Tensor, scores_MV: torch.Tensor, draws_NF: torch.Tensor, filtered: int
) -> torch.Tensor:
    """Draw a token, int64 `[N]`, for each row of `draws_NF` (float64, fields of tables.DrawField;
    at most `filtered` of them have a filter), from rows of the logits or of adjusted scores, both float32.

    The token is the inverse of the cumulative distribution at UNIFORM: over ids without a filter, else over
    what the filters leave, by falling score and then by id. Each filter looks at the whole distribution, and
    the first token stays. Without SCALE it is the first of the greatest scores. NaN counts as -inf.
    """
    assert sum(entry[DrawField.ROOM] >= 0 for entry in _rows(draws_NF)) <= filtered
    tokens = [
        _draw((logits_RV if entry[0] >= 0 else scores_MV)[_index(entry[0])], entry)
        for entry in _rows(draws_NF)
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device)


def adjust(
    logits_RV: torch.Tensor,
    counts_SV: torch.Tensor,
    masks_GW: torch.Tensor,
    rows_MF: torch.Tensor,
    items_IF: torch.Tensor,
) -> torch.Tensor:
    """Return adjusted scores, float32 `[M, V]`: the repetition penalty, then frequency and presence, then the
    shifts of items, and -inf where a mask has no bit.

    counts_SV   int32, how often each token occurs in an answer, and PROMPT
    masks_GW    int32, one bit for each token, the lowest bit first
    rows_MF     float64, fields of tables.AdjustmentField
    items_IF    float64, fields of tables.ItemField; -inf as a shift forbids the token
    """
    scores_MV = torch.empty(len(rows_MF), logits_RV.shape[1], device=logits_RV.device)
    for scores_V, row in zip(scores_MV, _rows(rows_MF), strict=True):
        logits_V = logits_RV[int(row[AdjustmentField.SOURCE])]
        counts_V, shifts_V = torch.zeros_like(logits_V, dtype=torch.int32), torch.zeros_like(logits_V)
        if row[AdjustmentField.SLOT] >= 0:
            counts_V += counts_SV[int(row[AdjustmentField.SLOT])]
        for item in _rows(items_IF[int(row[AdjustmentField.BEGIN]) : int(row[AdjustmentField.END])]):
            counts_V[int(item[ItemField.TOKEN])] += int(item[ItemField.MORE])
            shifts_V[int(item[ItemField.TOKEN])] = item[ItemField.SHIFT]
        scores_V[:] = _penalised(logits_V, counts_V, row) + shifts_V
        if row[AdjustmentField.MASK] >= 0:
            ids_V = torch.arange(len(scores_V), device=scores_V.device)
            words_V = masks_GW[int(row[AdjustmentField.MASK])][ids_V // 32]
            scores_V.masked_fill_((words_V >> (ids_V % 32)) & 1 == 0, -torch.inf)
    return scores_MV


def count(counts_SV: torch.Tensor, changes_CF: torch.Tensor) -> None:
    """Add the changes, float64 with the fields of tables.ChangeField, to the counts, int32."""
    for slot, token, by in _rows(changes_CF):
        counts_SV[int(slot), int(token)] += int(by)


def weights_of(scores_V: torch.Tensor, scale: float) -> torch.Tensor:
    """Return int64 weights: ONE for the greatest score, which may be infinite, and the integer part of ONE
    times 2^((score - greatest) * scale)."""
    top = scores_V.max()
    power_V = torch.where(scores_V == top, 0.0, (scores_V - top) * torch.tensor(scale, dtype=torch.float32))
    power_V = power_V.clamp(min=EXPONENT_MIN)
    whole_V = (power_V + ROUNDING) - ROUNDING
    part_V = power_V - whole_V
    sum_V = torch.full_like(part_V, POWERS[-1])
    for factor in POWERS[-2::-1]:
        sum_V = sum_V * part_V + factor
    exponent_V = (whole_V.int() + (127 + ONE.bit_length() - 1)) << 23
    return (sum_V * exponent_V.view(torch.float32)).long()


def _draw(scores_V: torch.Tensor, entry: list[float]) -> int:
    scores_V = torch.where(scores_V.isnan(), -torch.inf, scores_V)
    if entry[DrawField.SCALE] == 0:
        return int(scores_V.argmax())
    ids_V, kept = torch.arange(len(scores_V), device=scores_V.device), len(scores_V)
    if entry[DrawField.ROOM] >= 0:
        ids_V = scores_V.sort(descending=True, stable=True).indices
    weights_V = weights_of(scores_V, entry[DrawField.SCALE])[ids_V]
    sums_V = weights_V.cumsum(dim=0)
    if entry[DrawField.ROOM] >= 0:
        least, share = max(1, int(entry[DrawField.LEAST])), entry[DrawField.TOP_P]
        keep_V = weights_V >= least
        if share < 1:
            keep_V &= sums_V - weights_V < ceil(share * float(sums_V[-1]))
        kept = max(1, int(keep_V.sum()))  # all of them are at the front
        kept = min(kept, int(entry[DrawField.TOP_K]) or kept)
    mass = int(sums_V[kept - 1])
    target = min(int(entry[DrawField.UNIFORM] * float(mass)), mass - 1)
    return int(ids_V[int((sums_V <= target).sum())])


def _penalised(logits_V: torch.Tensor, counts_V: torch.Tensor, row: list[float]) -> torch.Tensor:
    repetition, presence, frequency = (
        torch.tensor(row[field], dtype=torch.float32, device=logits_V.device)
        for field in (AdjustmentField.REPETITION, AdjustmentField.PRESENCE, AdjustmentField.FREQUENCY)
    )
    times_V = counts_V & (PROMPT - 1)
    repeated_V = torch.where(logits_V > 0, logits_V * (1 / repetition), logits_V * repetition)
    scores_V = torch.where(counts_V != 0, repeated_V, logits_V)
    return scores_V - frequency * times_V - presence * (times_V > 0)


def _index(source: float) -> int:
    return int(source) if source >= 0 else -1 - int(source)


def _rows(table_NF: torch.Tensor) -> list[list[float]]:
    rows: list[list[float]] = cast("Any", table_NF).tolist()  # torch leaves the type open
    return rows
