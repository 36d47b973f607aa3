"""The cases of tests/triton on a device, and what only a device can show: equal bits, graphs, far offsets."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.kernels import experts, paged, recurrences
from tests.support.kernels.cases import random, relative_error, same_bits
from tests.triton import (
    test_batch_invariant,
    test_draw,
    test_elementwise,
    test_linear,
    test_moe,
    test_routing,
)
from tests.unit.kernels.pages import test_flashinfer
from tests.unit.kernels.test_stored import CODE_KINDS, stored
from tidemill.kernels.activation import cuda as activation
from tidemill.kernels.attention.flashinfer import installed
from tidemill.kernels.dispatch import operators
from tidemill.kernels.linear import cuda as linear_cuda
from tidemill.kernels.linear.stored import Kind, plain
from tidemill.kernels.moe.tiles import tiles_for
from tidemill.kernels.rms_norm import cuda as rms_norm_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OURS = operators("triton", Path())
MODULES = {
    "elementwise": test_elementwise,
    "route": test_routing,
    "draw": test_draw,
    "linear": test_linear,
}
SHARED = {
    "moe": (experts.check, experts.CASES),
    "attention": (paged.check, paged.CASES),
    "rope_store": (paged.check_store, paged.STORES),
    "recurrences": (recurrences.check, recurrences.CASES),
}
CHECKS = {
    f"{operator} {name}": partial(module.check, case)
    for operator, module in MODULES.items()
    for name, case in module.CASES.items()
}
CHECKS |= {
    f"{operator} {name}": partial(check, case, OURS)
    for operator, (check, cases) in SHARED.items()
    for name, case in cases.items()
}
CHECKS |= {name: partial(test_elementwise.check_sum, case) for name, case in test_elementwise.SUMS.items()}


@pytest.mark.parametrize("name", CHECKS)
def test_matches_the_definition(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [100, 1300, 8192])
def test_row_times_floats_has_the_same_bits_beside_any_number_of_others(
    depth: int, dtype: torch.dtype
) -> None:
    test_batch_invariant.check_product(depth, dtype, "cuda")


@pytest.mark.parametrize(("kind", "tokens"), test_moe.CODES.values(), ids=test_moe.CODES)
def test_experts_of_codes_match_the_definition(kind: Kind, tokens: int) -> None:
    test_moe.check_codes(kind, tokens, "cuda")


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_row_times_codes_has_the_same_bits_beside_any_number_of_others(kind: Kind) -> None:
    """Spans of the depth are added in one order by programs of their own, and by one of them."""
    part = stored(kind, 1000, 2048, 128, shifted=False).moved(lambda rows: rows.cuda())
    weight, x = linear_cuda.pack([part]), random(torch.Generator().manual_seed(0), 20_000, 2048).cuda()
    whole = linear_cuda.logits(x, weight)
    for rows in (1, 17, 64, 100, 3000):
        assert same_bits(linear_cuda.logits(x[:rows], weight), whole[:rows]), rows


@pytest.mark.parametrize("vocabulary", [33, 5000])
def test_adjusted_scores_have_the_bits_of_the_definition(vocabulary: int) -> None:
    test_draw.check_adjusted(vocabulary, "cuda")


@pytest.mark.parametrize("window", [None, 50, 280])
@pytest.mark.parametrize(("heads", "dim"), [((64, 8), 64), ((32, 8), 128), ((16, 2), 256)])
def test_attention_has_the_same_bits_in_any_batch(
    heads: tuple[int, int], dim: int, window: int | None
) -> None:
    paged.check_any_batch(OURS, heads, dim, window, "cuda")


@pytest.mark.parametrize("window", [None, 128, 4096, 20_000])
def test_attention_over_spans_and_windows_of_every_length(window: int | None) -> None:
    """Longer than the spans of the usual length reach, and windows of less than one of them and of all."""
    long = paged.Case(
        new=[1, 1, 30, 1], before=[39_999, 127, 5000, 16_384], heads=(16, 2), dim=128, window=window,
        sinks=bool(window),
    )  # fmt: skip
    paged.check(long, OURS, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_token_has_the_same_bits_beside_any_number_of_others(dtype: torch.dtype) -> None:
    """One instruction, in tiles of every size, adds up an output in one order."""
    layer = experts.layer_of(600, 16, 256, 128, dtype).to("cuda")
    whole = experts.moe(OURS, layer, 4)
    counts = (1, 20, 70, 150)
    assert [tiles_for(4 * n, 16).tokens for n in (*counts, 600)] == [16, 16, 32, 64, 128]
    for count in counts:
        rows = list(range(600 - count, 600))
        assert same_bits(experts.moe(OURS, layer.rows(rows), 4), whole[rows]), count


def test_experts_in_a_graph_follow_their_inputs() -> None:
    """Captured once, for any routing: nothing of it was decided on the host."""
    layer, other = (experts.layer_of(8, 16, 256, 128, torch.bfloat16, seed).to("cuda") for seed in (0, 1))
    wanted = experts.moe(OURS, replace(layer, x_TH=other.x_TH, logits_TE=other.logits_TE), 4)
    experts.moe(OURS, layer, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = experts.moe(OURS, layer, 4)
    layer.x_TH.copy_(other.x_TH)
    layer.logits_TE.copy_(other.logits_TE)
    graph.replay()
    assert same_bits(y_TH, wanted)


def need_memory(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of device memory")


@pytest.mark.parametrize("page_tokens", [16, 64], ids=["pointers", "descriptor"])
def test_attention_far_into_the_arena(page_tokens: int) -> None:
    """The arena has 8 GiB, and NaN where no page of the step is."""
    need_memory(10)

    def arena(size: int) -> torch.Tensor:
        return torch.full((size,), torch.nan, dtype=torch.bfloat16, device="cuda")

    case = paged.Case(new=[1, 20], before=[40, 30], page_tokens=page_tokens, heads=(2, 1), dim=32)
    paged.check_far(case, OURS, 1 << 32, arena, "cuda")


def test_experts_beyond_32_bits() -> None:
    """The last of 1100 experts, more than 2^31 weights after the first."""
    need_memory(16)
    few = experts.layer_of(5, 2, 2048, 512, torch.bfloat16).to("cuda")
    far = few.gate_up.new_full((1100, 1024, 2048), torch.nan)
    far[-2:] = few.gate_up
    down = few.down.new_full((1100, 2048, 512), torch.nan)
    down[-2:] = few.down
    logits_TE = few.logits_TE.new_full((5, 1100), -100)
    logits_TE[:, -2:] = few.logits_TE
    wide = replace(few, logits_TE=logits_TE, gate_up=far, down=down)
    assert same_bits(experts.moe(OURS, wide, 2), experts.moe(OURS, few, 2))


@pytest.mark.parametrize("width", [65, 2048, 8192])
def test_sum_has_the_same_bits_beside_any_number_of_others(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    residual_TH, weight_H = random(draw, 300, width).cuda(), random(draw, width).cuda()
    branch_TH = random(draw, 300, width).cuda().bfloat16()
    whole = rms_norm_cuda.add_norm(residual_TH.clone(), branch_TH, weight_H, 1e-6)
    for count in (1, 7, 64):
        few = rms_norm_cuda.add_norm(residual_TH[-count:].clone(), branch_TH[-count:], weight_H, 1e-6)
        for found, wanted in zip(few, whole, strict=True):
            assert same_bits(found, wanted[-count:]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 1, 1), (5, 7, 300), (64, 528, 2048), (3, 5000, 127)])
def test_logits_are_not_rounded(rows: int, out: int, width: int, dtype: torch.dtype) -> None:
    """Rounded to bfloat16 they would differ a hundred times as much; rows may be slices of wider ones."""
    draw = torch.Generator().manual_seed(out)
    x, weight = random(draw, rows, width + 8)[:, 8:].to(dtype), random(draw, out, width).to(dtype)
    found = linear_cuda.logits(x.cuda(), linear_cuda.pack([plain(weight.cuda())]))
    assert found.dtype == torch.float32
    assert relative_error(found.cpu(), x.double() @ weight.double().T) < 1e-5


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer-python")
@pytest.mark.parametrize("window", [None, 20])
def test_flashinfer_reads_our_pages(window: int | None) -> None:
    test_flashinfer.check_rows(window, installed(activation.sigmoid_mul), "cuda")
