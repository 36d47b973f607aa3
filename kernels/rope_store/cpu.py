"""`rope_angles` and `rope_store` on CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.kernels.shared.arguments import address, address_or_null, page_arguments
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.fp8 import Pages
from tidemill.kernels.shared.rows import Rows

RopeStore = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float, Tensor, Pages, Rows], Tensor
]


def bind_rope_angles(library: Library) -> Callable[[Tensor, Tensor], Tensor]:
    call = library.function("rope_angles")

    def rope_angles(positions_T: Tensor, frequencies_R: Tensor) -> Tensor:
        tokens, half = len(positions_T), len(frequencies_R)
        angles_T2R = frequencies_R.new_empty(tokens, 2, half)
        call(
            address(positions_T, tokens, dtype=torch.int64), address(frequencies_R, half),
            angles_T2R.data_ptr(), tokens, half,
        )  # fmt: skip
        return angles_T2R

    return rope_angles


def bind_rope_store(library: Library) -> RopeStore:
    call = library.function("rope_store")

    def rope_store(
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor | None,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        epsilon: float,
        angles_T2R: Tensor,
        cache: Pages,
        rows: Rows,
    ) -> Tensor:
        (tokens, q_heads, dim), kv_heads, half = q_THD.shape, k_TKD.shape[1], angles_T2R.shape[2]
        assert q_THD.dtype == torch.float32
        assert dim == 1 or q_THD.stride(2) == 1
        assert 2 * half <= dim
        parts = [k_TKD] if v_TKD is None else [k_TKD, v_TKD]
        for part_TKD in parts:
            assert part_TKD.shape == (tokens, kv_heads, dim)
            assert part_TKD.dtype == torch.float32
            assert kv_heads == 1 or part_TKD.stride(1) == dim, "the heads of a token lie side by side"
            assert dim == 1 or part_TKD.stride(2) == 1
        assert (cache.shape[1], cache.shape[2], cache.shape[4]) == (kv_heads, len(parts), dim)
        out_THD = q_THD.new_empty(tokens, q_heads, dim)
        call(
            q_THD.data_ptr(), q_THD.stride(0), q_THD.stride(1), k_TKD.data_ptr(), k_TKD.stride(0),
            None if v_TKD is None else v_TKD.data_ptr(), 0 if v_TKD is None else v_TKD.stride(0),
            address_or_null(q_weight_D, dim), address_or_null(k_weight_D, dim),
            address(angles_T2R, tokens, 2, half), out_THD.data_ptr(), *page_arguments(cache, rows, tokens),
            q_heads, kv_heads, dim, half, epsilon,
        )  # fmt: skip
        return out_THD

    return rope_store
