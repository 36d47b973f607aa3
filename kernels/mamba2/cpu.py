"""`mamba2` on CPU: recurrent for decode and prefill alike, so a sequence may be cut anywhere."""

from collections.abc import Callable

import torch

from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

Mamba2 = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads, torch.Tensor, Rows], torch.Tensor]


def bind(library: Library) -> Mamba2:
    call = library.function("mamba2")

    def mamba2(
        mixed_TGC: torch.Tensor,
        z_TGRV: torch.Tensor,
        dt_TH: torch.Tensor,
        heads: Heads,
        state_SGRKV: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        _, groups, values, key_dim, value_dim = state_SGRKV.shape
        z_token, z_group, z_head, z_element = z_TGRV.stride()
        assert mixed_TGC.dtype == z_TGRV.dtype == dt_TH.dtype == torch.float32
        assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
        assert mixed_TGC.is_contiguous()
        assert mixed_TGC.shape[2] == 2 * key_dim + values * value_dim
        assert z_TGRV.shape == (len(mixed_TGC), groups, values, value_dim)
        assert (z_head, z_element) == (value_dim, 1)
        assert dt_TH.stride(1) == 1
        assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
        assert rows.writes_BK.is_contiguous()
        y_TGRV = mixed_TGC.new_empty(z_TGRV.shape)
        call(
            mixed_TGC.data_ptr(), z_TGRV.data_ptr(), z_token, z_group, dt_TH.data_ptr(), dt_TH.stride(0),
            heads.a_log_H.data_ptr(), heads.dt_bias_H.data_ptr(), heads.skip_H.data_ptr(),
            heads.dt_min, heads.dt_max,
            state_SGRKV.data_ptr(), state_SGRKV.dtype == torch.bfloat16,
            state_SGRKV.stride(0), state_SGRKV.stride(1), y_TGRV.data_ptr(),
            rows.cu_B1.data_ptr(), rows.read_B.data_ptr(), rows.writes_BK.data_ptr(),
            *rows.writes_BK.shape, groups, values, key_dim, value_dim,
        )  # fmt: skip
        return y_TGRV

    return mamba2
