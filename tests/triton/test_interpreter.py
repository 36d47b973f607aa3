# pyrefly: ignore-errors[bad-argument-type, implicit-any-parameter]
"""The interpreter's bfloat16 is that of torch: else the parity of bfloat16 kernels would mean nothing."""

import torch
import triton
import triton.language as tl


@triton.jit
def combine(a, b, sums, dots, N: tl.constexpr) -> None:  # noqa: ANN001 - Triton takes annotations for its own
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a_NN, b_NN = tl.load(a + at), tl.load(b + at)
    tl.store(sums + at, a_NN + b_NN)
    tl.store(dots + at, tl.dot(a_NN, b_NN))


def test_bfloat16_is_that_of_torch() -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    sums, dots = torch.empty_like(a), torch.empty(16, 16)
    combine[(1,)](a, b, sums, dots, N=16)
    assert torch.equal(sums, a + b)
    assert torch.allclose(dots, a.float() @ b.float(), rtol=1e-6)
