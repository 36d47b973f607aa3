"""`draw`, `adjust` and `count` on CPU."""

from collections.abc import Callable

import torch

from tidemill.kernels.draw.tables import AdjustmentField, ChangeField, DrawField, ItemField
from tidemill.kernels.shared.build import Library

DrawTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Adjust = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def bind_draw(library: Library) -> DrawTokens:
    call = library.function("draw")

    def draw(
        logits_RV: torch.Tensor, scores_MV: torch.Tensor, draws_NF: torch.Tensor, filtered: int
    ) -> torch.Tensor:
        _check(draws_NF, len(DrawField))
        assert filtered <= len(draws_NF)
        assert logits_RV.dtype == scores_MV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        assert scores_MV.is_contiguous()
        tokens_N = torch.empty(len(draws_NF), dtype=torch.int64)
        call(
            logits_RV.data_ptr(), len(logits_RV), logits_RV.stride(0), scores_MV.data_ptr(), len(scores_MV),
            logits_RV.shape[1], draws_NF.data_ptr(), len(draws_NF), tokens_N.data_ptr(),
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
        _check(rows_MF, len(AdjustmentField))
        _check(items_IF, len(ItemField))
        assert logits_RV.dtype == torch.float32
        assert counts_SV.dtype == masks_GW.dtype == torch.int32
        assert logits_RV.stride(1) == 1
        assert counts_SV.is_contiguous()
        assert masks_GW.is_contiguous()
        vocabulary = logits_RV.shape[1]
        scores_MV = logits_RV.new_empty(len(rows_MF), vocabulary)
        call(
            logits_RV.data_ptr(), len(logits_RV), logits_RV.stride(0), counts_SV.data_ptr(), len(counts_SV),
            masks_GW.data_ptr(), *masks_GW.shape, vocabulary, rows_MF.data_ptr(), len(rows_MF),
            items_IF.data_ptr(), len(items_IF), scores_MV.data_ptr(),
        )  # fmt: skip
        return scores_MV

    return adjust


def bind_count(library: Library) -> Callable[[torch.Tensor, torch.Tensor], None]:
    call = library.function("count")

    def count(counts_SV: torch.Tensor, changes_CF: torch.Tensor) -> None:
        _check(changes_CF, len(ChangeField))
        assert counts_SV.dtype == torch.int32
        assert counts_SV.is_contiguous()
        call(counts_SV.data_ptr(), *counts_SV.shape, changes_CF.data_ptr(), len(changes_CF))

    return count


def _check(table_NF: torch.Tensor, fields: int) -> None:
    assert table_NF.dtype == torch.float64
    assert table_NF.is_contiguous()
    assert table_NF.shape[1] == fields
