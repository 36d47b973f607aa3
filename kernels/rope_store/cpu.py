"""`rope_angles` and `rope_store` on CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.pages import page_arguments
from tidemill.kernels.shared.rows import Rows

RopeStore = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float, Tensor, Tensor, Rows], Tensor
]


def bind_rope_angles(library: Library) -> Callable[[Tensor, Tensor], Tensor]:
    call = library.function("rope_angles")

    def rope_angles(positions_T: Tensor, frequencies_R: Tensor) -> Tensor:
        tokens, half = len(positions_T), len(frequencies_R)
        assert positions_T.dtype == torch.int64
        assert positions_T.is_contiguous()
        angles_T2R = frequencies_R.new_empty(tokens, 2, half)
        call(positions_T.data_ptr(), frequencies_R.data_ptr(), angles_T2R.data_ptr(), tokens, half)
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
        cache: Tensor,
        rows: Rows,
    ) -> Tensor:
        tokens, q_heads, dim = q_THD.shape
        kv_heads = k_TKD.shape[1]
        assert q_THD.dtype == k_TKD.dtype == torch.float32
        assert dim == 1 or q_THD.stride(2) == 1
        assert _packed(k_TKD)
        v, v_stride = None, 0
        if v_TKD is not None:
            assert v_TKD.dtype == torch.float32
            assert _packed(v_TKD)
            v, v_stride = v_TKD.data_ptr(), v_TKD.stride(0)
        assert cache.shape[2] == (1 if v is None else 2)
        out_THD = q_THD.new_empty(tokens, q_heads, dim)
        call(
            q_THD.data_ptr(), q_THD.stride(0), q_THD.stride(1), k_TKD.data_ptr(), k_TKD.stride(0),
            v, v_stride, _address(q_weight_D), _address(k_weight_D),
            angles_T2R.data_ptr(), out_THD.data_ptr(), *page_arguments(cache),
            rows.pages_BN.data_ptr(), rows.pages_BN.stride(0),
            rows.cu_B1.data_ptr(), rows.lens_B.data_ptr(), len(rows.lens_B),
            q_heads, kv_heads, dim, angles_T2R.shape[2], cache.shape[3], epsilon,
        )  # fmt: skip
        return out_THD

    return rope_store


def _packed(x_TKD: Tensor) -> bool:
    """Return whether the heads of a token lie side by side."""
    _, heads, dim = x_TKD.shape
    _, head_stride, stride = x_TKD.stride()
    return (heads == 1 or head_stride == dim) and (dim == 1 or stride == 1)


def _address(weight_D: Tensor | None) -> int | None:
    if weight_D is None:
        return None
    assert weight_D.dtype == torch.float32
    assert weight_D.is_contiguous()
    return weight_D.data_ptr()
