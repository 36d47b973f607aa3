# pyright: basic
"""The cases of tests/triton on a device, and what only a device can show: equal bits, graphs, far offsets."""

import pytest
import torch

from tests.triton import (
    test_attention,
    test_causal_conv,
    test_elementwise,
    test_gated_delta,
    test_moe,
    test_rope_store,
)
from tests.unit.kernels.cases import same_bits
from tidemill.kernels.moe.cuda import tile_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODULES = {
    "attention": test_attention,
    "rope_store": test_rope_store,
    "gated_delta": test_gated_delta,
    "causal_conv": test_causal_conv,
    "elementwise": test_elementwise,
    "moe": test_moe,
}
CASES = {
    f"{operator} {name}": (module.check, case)
    for operator, module in MODULES.items()
    for name, case in module.CASES.items()
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name: str) -> None:
    check, case = CASES[name]
    check(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_beside_any_number_of_others(dtype: torch.dtype) -> None:
    """In tiles of every size: what adds up an output is one instruction in one order."""
    layer = test_moe.layer_of(600, 16, 256, 128, dtype).on("cuda")
    whole = test_moe.moe(layer, layer.experts(4))
    counts = (1, 20, 70, 150)
    assert [tile_tokens(4 * n, 16) for n in (*counts, 600)] == [16, 16, 32, 64, 128]
    for count in counts:
        rows = list(range(600 - count, 600))
        assert same_bits(test_moe.moe(layer.rows(rows), layer.experts(4)), whole[rows]), count


def test_experts_in_a_graph_follow_their_inputs() -> None:
    """Captured once, for any routing: nothing of it was decided on the host."""
    layer, other = (test_moe.layer_of(8, 16, 256, 128, torch.bfloat16, seed).on("cuda") for seed in (0, 1))
    wanted = test_moe.moe(
        test_moe.Layer(other.x_TH, other.logits_TE, layer.gate_up, layer.down), layer.experts(4)
    )
    test_moe.moe(layer, layer.experts(4))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = test_moe.moe(layer, layer.experts(4))
    layer.x_TH.copy_(other.x_TH)
    layer.logits_TE.copy_(other.logits_TE)
    graph.replay()
    assert same_bits(y_TH, wanted)


def test_experts_beyond_32_bits() -> None:
    """The last of 1100 experts, more than 2^31 weights after the first."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of device memory")
    few = test_moe.layer_of(5, 2, 2048, 512, torch.bfloat16).on("cuda")
    far = few.gate_up.new_full((1100, 1024, 2048), torch.nan)
    far[-2:] = few.gate_up
    down = few.down.new_full((1100, 2048, 512), torch.nan)
    down[-2:] = few.down
    logits_TE = few.logits_TE.new_full((5, 1100), -100)
    logits_TE[:, -2:] = few.logits_TE
    wide = test_moe.Layer(few.x_TH, logits_TE, far, down)
    assert same_bits(test_moe.moe(wide, wide.experts(2)), test_moe.moe(few, few.experts(2)))
