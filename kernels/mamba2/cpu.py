"""`mamba2` on CPU: recurrent for decode and prefill alike, so a sequence may be cut anywhere."""

from collections.abc import Callable

import torch

from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.arguments import address, state_arguments
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

Mamba2 = Callable[..., torch.Tensor]


def bind_mamba2(library: Library) -> Mamba2:
    call = library.function("mamba2")

    def mamba2(
        mixed_TGC: torch.Tensor,
        z_TGRV: torch.Tensor,
        dt_TH: torch.Tensor,
        heads: Heads,
        state_SGRKV: torch.Tensor,
        rows: Rows,
        round_tokens: int = 0,
    ) -> torch.Tensor:
        tokens, (_, groups, values, key_dim, value_dim) = mixed_TGC.shape[0], state_SGRKV.shape
        z_token, z_group, z_head, z_element = z_TGRV.stride()
        assert z_TGRV.dtype == dt_TH.dtype == torch.float32
        assert z_TGRV.shape == (tokens, groups, values, value_dim)
        assert (z_head, z_element) == (value_dim, 1)
        assert dt_TH.shape == (tokens, groups * values)
        assert dt_TH.stride(1) == 1
        assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
        assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
        y_TGRV = mixed_TGC.new_empty(z_TGRV.shape)
        call(
            address(mixed_TGC, tokens, groups, 2 * key_dim + values * value_dim),
            z_TGRV.data_ptr(), z_token, z_group, dt_TH.data_ptr(), dt_TH.stride(0),
            address(heads.a_log_H, groups * values), address(heads.dt_bias_H, groups * values),
            address(heads.skip_H, groups * values), heads.dt_min, heads.dt_max, y_TGRV.data_ptr(),
            *state_arguments(state_SGRKV, rows, tokens), state_SGRKV.dtype == torch.bfloat16,
            address(rows.lens_B, len(rows.lens_B), dtype=torch.int32), round_tokens,
            groups, values, key_dim, value_dim,
        )  # fmt: skip
        return y_TGRV

    return mamba2
