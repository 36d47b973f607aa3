"""`gated_delta` on CPU: recurrent for decode and prefill alike, so a sequence may be cut anywhere."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.arguments import address, state_arguments
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

GatedDelta = Callable[..., torch.Tensor]


def bind_gated_delta(library: Library) -> GatedDelta:
    call = library.function("gated_delta")

    def gated_delta(
        mixed_TGC: torch.Tensor,
        gates_TI: torch.Tensor,
        a_log_H: torch.Tensor,
        dt_bias_H: torch.Tensor,
        state_SGRKV: torch.Tensor,
        rows: Rows,
        round_tokens: int = 0,
    ) -> torch.Tensor:
        tokens, (_, groups, heads, key_dim, value_dim) = mixed_TGC.shape[0], state_SGRKV.shape
        assert gates_TI.shape == (tokens, groups * 2 * heads)
        assert gates_TI.dtype == torch.float32
        assert gates_TI.stride(1) == 1
        assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
        assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
        o_TGRV = mixed_TGC.new_empty(tokens, groups, heads, value_dim)
        call(
            address(mixed_TGC, tokens, groups, 2 * key_dim + heads * value_dim),
            gates_TI.data_ptr(), gates_TI.stride(0),
            address(a_log_H, groups * heads), address(dt_bias_H, groups * heads), o_TGRV.data_ptr(),
            *state_arguments(state_SGRKV, rows, tokens), state_SGRKV.dtype == torch.bfloat16,
            address(rows.lens_B, len(rows.lens_B), dtype=torch.int32), round_tokens,
            groups, heads, key_dim, value_dim,
        )  # fmt: skip
        return o_TGRV

    return gated_delta
