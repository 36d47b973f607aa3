"""`draw`, `adjust` and `count` on CPU."""

from collections.abc import Callable
from enum import IntEnum

import torch

from tidemill.kernels.draw.tables import AdjustmentField, ChangeField, DrawField, ItemField
from tidemill.kernels.shared.arguments import address
from tidemill.kernels.shared.build import Library

DrawTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Adjust = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def bind_draw(library: Library) -> DrawTokens:
    call = library.function("draw")

    def draw(
        logits_RV: torch.Tensor, scores_MV: torch.Tensor, draws_NF: torch.Tensor, filtered: int
    ) -> torch.Tensor:
        assert filtered <= len(draws_NF)
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        (rows, vocabulary), scores, draws = logits_RV.shape, len(scores_MV), len(draws_NF)
        tokens_N = torch.empty(draws, dtype=torch.int64)
        call(
            logits_RV.data_ptr(), rows, logits_RV.stride(0), address(scores_MV, scores, vocabulary), scores,
            vocabulary, _table(draws_NF, DrawField), draws, tokens_N.data_ptr(),
        )  # fmt: skip
        return tokens_N

    return draw


def bind_adjust(library: Library) -> Adjust:
    call = library.function("adjust")

    def adjust(
        logits_RV: torch.Tensor,
        counts_SV: torch.Tensor,
        masks_GW: torch.Tensor,
        rows_MF: torch.Tensor,
        items_IF: torch.Tensor,
    ) -> torch.Tensor:
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        (masks, words), slots, vocabulary = masks_GW.shape, len(counts_SV), logits_RV.shape[1]
        assert not masks or 32 * words >= vocabulary
        assert not slots or counts_SV.shape[1] == vocabulary
        scores_MV = logits_RV.new_empty(len(rows_MF), vocabulary)
        call(
            logits_RV.data_ptr(), len(logits_RV), logits_RV.stride(0),
            address(counts_SV, *counts_SV.shape, dtype=torch.int32), slots,
            address(masks_GW, masks, words, dtype=torch.int32), masks, words, vocabulary,
            _table(rows_MF, AdjustmentField), len(rows_MF), _table(items_IF, ItemField), len(items_IF),
            scores_MV.data_ptr(),
        )  # fmt: skip
        return scores_MV

    return adjust


def bind_count(library: Library) -> Callable[[torch.Tensor, torch.Tensor], None]:
    call = library.function("count")

    def count(counts_SV: torch.Tensor, changes_CF: torch.Tensor) -> None:
        slots, vocabulary = counts_SV.shape
        call(
            address(counts_SV, slots, vocabulary, dtype=torch.int32), slots, vocabulary,
            _table(changes_CF, ChangeField), len(changes_CF),
        )  # fmt: skip

    return count


def _table(table_NF: torch.Tensor, fields: type[IntEnum]) -> int:
    return address(table_NF, len(table_NF), len(fields), dtype=torch.float64)
