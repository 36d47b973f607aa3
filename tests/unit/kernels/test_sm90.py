"""The launches of each Triton operator, compiled for sm_90, which needs no device: no kernel spills, all fit,
and the matrix units and the copy engine are used where intended. The largest ones and products with codes are
compiled for sm_80 and sm_89 too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from tests.support.kernels.cases import step
from tests.support.kernels.launched import META, launching
from tests.support.kernels.offline import SHARED_BYTES_MAX, compiling
from tests.unit.kernels.test_stored import stored
from tidemill.kernels.activation import cuda as activation_cuda
from tidemill.kernels.attention import cuda as attention_cuda
from tidemill.kernels.causal_conv import cuda as causal_conv_cuda
from tidemill.kernels.draw import cuda as draw_cuda
from tidemill.kernels.draw.tables import AdjustmentField, ChangeField, DrawField, ItemField
from tidemill.kernels.gated_delta import cuda as gated_delta_cuda
from tidemill.kernels.linear import cuda as linear_cuda
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Kind, Stored
from tidemill.kernels.mamba2 import cuda as mamba2_cuda
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.moe import cuda as moe_cuda
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing
from tidemill.kernels.rms_norm import cuda as rms_norm_cuda
from tidemill.kernels.rope_store import cuda as rope_store_cuda
from tidemill.kernels.shared import tiles
from tidemill.kvstore.layout import Attention, Latent, layout_of
from tidemill.kvstore.memory.backing import Mmap
from tidemill.workers.models.inputs import caches_of

pytestmark = pytest.mark.slow


def run_experts(tokens: int) -> Callable[[], None]:
    """Return a run of Qwen3-Next's experts; each number of tokens has its own tile size."""

    def run() -> None:
        count, width, inner = 512, 2048, 512
        reserved = Mmap(2 * count * 3 * inner * width)
        weights = reserved.memory.view(torch.bfloat16)
        gate_up = weights[: count * 2 * inner * width].view(count, 2 * inner, width)
        down = weights[gate_up.numel() :].view(count, width, inner)
        experts = Experts(Packed(gate_up, None, 2 * inner, width), Packed(down, None, width, inner))
        x_TH, logits_TE = (torch.zeros(tokens, n, dtype=torch.bfloat16) for n in (width, count))
        rows = step([tokens])
        for routing in (Routing(10, renormalise=True), Routing(10, renormalise=True, shared=1, gated=True)):
            choice = moe_cuda.route(logits_TE[:, : count - routing.shared + routing.gated], routing, rows)
            hidden = moe_cuda.moe_inner(x_TH, choice, experts)
            moe_cuda.moe_outer(hidden, choice, experts, x_TH, logits_TE[:, :1])
            moe_cuda.moe_outer(hidden, choice, experts, None, None)
            residual_TH, norm_H = torch.zeros(tokens, width), torch.zeros(width)
            moe_cuda.moe_outer_norm(hidden, choice, experts, None, None, residual_TH, norm_H, 1e-6)

    return run


def run_biased_experts() -> None:
    """Run the experts of gpt-oss, and the routing of DeepSeek-V3."""
    count, width, inner = 32, 2880, 2880
    bias_N = torch.zeros(count, 2 * inner, dtype=torch.bfloat16)
    gate_up = Packed(torch.zeros(count, 2 * inner, width, dtype=torch.bfloat16), bias_N, 2 * inner, width)
    down = Packed(
        torch.zeros(count, width, inner, dtype=torch.bfloat16), bias_N[:, :width].contiguous(), width, inner
    )
    experts = Experts(gate_up, down, "clamped")
    for tokens in (16, 2048):
        x_TH, logits_TE = torch.zeros(tokens, width, dtype=torch.bfloat16), torch.zeros(tokens, 256)
        choice = moe_cuda.route(logits_TE[:, :count], Routing(4, renormalise=True))
        hidden = moe_cuda.moe_inner(x_TH, choice, experts)
        moe_cuda.moe_outer(hidden, choice, experts, x_TH, None)
        grouped = Routing(8, renormalise=True, score="sigmoid", bias_E=logits_TE[0], groups=8, groups_kept=4)
        moe_cuda.route(logits_TE, grouped)


def attend(
    new: list[int],
    heads: tuple[int, int],
    dim: int,
    *,
    page_tokens: int = 64,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    coded: bool = False,
    pages: int = 64,
    latent: bool = False,
) -> Callable[[], None]:
    """Rows of `new` tokens after 500, in tables of `pages`: qk-norm, rope and store, then attention, with
    sinks beside a window. DeepSeek-V3's latents have no norm, and no gate."""

    def run() -> None:
        q_heads, kv_heads = heads
        cache = torch.zeros(3, kv_heads, 2, 1 if latent else 2, page_tokens, dim, dtype=dtype)[:, :, 1]
        if coded:
            layers = [Latent(width=dim) if latent else Attention(kv_heads=kv_heads, head_dim=dim)] * 2
            layout = layout_of(layers, page_tokens, "fp8_per_token_head", extent_bytes_min=1, granule_bytes=1)
            cache = caches_of(layout, torch.zeros(3 * layout.page_bytes, dtype=torch.uint8)).kv[1]
        rows = step(new, [500] * len(new), torch.zeros(len(new), pages, dtype=torch.int32))
        tokens = sum(new)
        q_gate_THD = torch.zeros(tokens, q_heads, dim if latent else 2 * dim, dtype=dtype)
        k_TKD, v_TKD = torch.zeros(2, tokens, kv_heads, dim, dtype=dtype)
        v_TKD, weight_D = (None, None) if latent else (v_TKD, torch.ones(dim, dtype=dtype))
        angles_T2R, sinks_H = torch.zeros(tokens, 2, 32), torch.zeros(q_heads) if window else None
        q_THD = rope_store_cuda.rope_store(
            q_gate_THD[..., :dim], k_TKD, v_TKD, weight_D, weight_D, 1e-6, angles_T2R, cache, rows
        )
        attention_cuda.attention(q_THD, cache, rows, window, sinks_H)
        if not latent:
            attention_cuda.gated_attention(q_THD, cache, rows, window, sinks_H, q_gate_THD[..., dim:])

    return run


def slots_of(groups: int, past: int, temporal: int, states: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two slots of states as memory has them: columns of the convolution in float32, then `temporal`
    elements."""
    memory = torch.zeros(2, groups, 4 * past + temporal * states.itemsize, dtype=torch.uint8)
    return memory[..., : 4 * past].view(torch.float32), memory[..., 4 * past :].view(states)


def recur(
    new: list[int], kept: int, key_heads: int, dim: int, states: torch.dtype = torch.float32
) -> Callable[[], None]:
    """A linear layer like those of Qwen3-Next: two value heads for each key head."""

    def run() -> None:
        tokens, channels, past = sum(new), 4 * dim, 3 * 4 * dim
        rows = step(new, writes=[[*range(b * kept, (b + 1) * kept)] for b in range(len(new))])
        columns, temporal = slots_of(key_heads, past, 2 * dim * dim, states)
        projected = torch.zeros(tokens, key_heads * 6 * dim + 4 * key_heads, dtype=torch.bfloat16)
        qkvz = projected[:, : -4 * key_heads].view(tokens, key_heads, 6 * dim)
        mixed = causal_conv_cuda.causal_conv(
            qkvz[..., :channels], projected.new_zeros(4, key_heads, channels), None,
            columns.view(2, key_heads, 3, channels), rows,
        )  # fmt: skip
        per_head = projected.new_zeros(2 * key_heads)
        out = gated_delta_cuda.gated_delta(
            mixed, projected[:, -4 * key_heads :], per_head, per_head,
            temporal.view(2, key_heads, 2, dim, dim), rows,
        )  # fmt: skip
        z = qkvz[..., channels:].view(out.shape)
        rms_norm_cuda.rms_norm_gated(out, z, projected.new_zeros(dim), 1e-6)

    return run


def scan(
    new: list[int],
    kept: int,
    groups: int,
    heads: int,
    dims: tuple[int, int],
    states: torch.dtype = torch.float32,
) -> Callable[[], None]:
    """A recurrent layer like those of Granite 4: `heads` in each head group."""

    def run() -> None:
        tokens, (key_dim, value_dim), every = sum(new), dims, groups * heads
        inner, past = every * value_dim, 3 * (2 * key_dim + heads * value_dim)
        rows = step(new, writes=[[*range(b * kept, (b + 1) * kept)] for b in range(len(new))])
        columns, temporal = slots_of(groups, past, heads * key_dim * value_dim, states)
        projected = torch.zeros(tokens, 2 * inner + 2 * key_dim + every, dtype=torch.bfloat16)
        x = projected.new_zeros(tokens, groups, past // 3)
        taps, bias = projected.new_zeros(4, groups, past // 3).float(), projected.new_zeros(groups, past // 3)
        mixed = causal_conv_cuda.causal_conv(
            x, taps, bias.float(), columns.view(2, groups, 3, past // 3), rows
        )
        per_head = taps.new_zeros(every)
        y = mamba2_cuda.mamba2(
            mixed, projected[:, :inner].view(tokens, groups, heads, value_dim), projected[:, -every:],
            Heads(per_head, per_head, per_head, 0.0, float("inf")),
            temporal.view(2, groups, heads, key_dim, value_dim), rows,
        )  # fmt: skip
        rms_norm_cuda.rms_norm(y.flatten(1), taps.new_zeros(inner), 1e-6)

    return run


def run_elementwise() -> None:
    for width in (2048, 5120, 8192):
        branch, weight = torch.zeros(64, width, dtype=torch.bfloat16), torch.zeros(width)
        residual, _ = rms_norm_cuda.add_norm(None, branch, weight, 1e-6)
        rms_norm_cuda.add_norm(residual, branch, weight, 1e-6)
        rms_norm_cuda.add_norm(residual, branch.float(), weight, 1e-6)
    hidden = torch.zeros(64, 2048, dtype=torch.bfloat16)
    activation_cuda.silu_mul(hidden)
    both = torch.zeros(64, 16, 512, dtype=torch.bfloat16)
    activation_cuda.sigmoid_mul(torch.zeros(64, 16, 256, dtype=torch.bfloat16), both[..., 256:])
    one = hidden[:, None, :1]
    activation_cuda.sigmoid_mul(hidden[:, None], one.expand(64, 1, 2048))


def draw_tokens() -> None:
    """Draws of every kind: one kernel has them all."""
    vocabulary = 151_936
    logits, tables = torch.zeros(2, vocabulary), torch.zeros(2, 16, dtype=torch.float64)
    counts = torch.zeros(2, vocabulary, dtype=torch.int32)
    rows, items, changes, draws = (
        tables[:, : len(fields)].contiguous()
        for fields in (AdjustmentField, ItemField, ChangeField, DrawField)
    )
    draw_cuda.count(counts, changes)
    draw_cuda.draw(logits, draw_cuda.adjust(logits, counts, counts[:, :4748], rows, items), draws, 2)


MIXED = [1, 12, 300]
LAUNCHES: dict[str, Callable[[], None]] = {
    "attention, decode": attend([1] * 32, (16, 2), 256),
    "attention, mixed": attend(MIXED, (16, 2), 256),
    "attention, decode, dim 128": attend([1] * 32, (32, 8), 128),
    "attention, mixed, dim 128": attend(MIXED, (32, 8), 128),
    "attention, mixed, long text": attend(MIXED, (16, 2), 256, pages=256),
    "attention, mixed, long text, dim 128": attend(MIXED, (32, 8), 128, pages=256),
    "attention, mixed, long text, FP8": attend(MIXED, (16, 2), 256, pages=256, coded=True),
    "attention, window, dim 64": attend(MIXED, (64, 8), 64, window=128),
    "attention, window, dim 128": attend(MIXED, (32, 8), 128, window=4096),
    "attention, window, dim 256": attend(MIXED, (8, 4), 256, window=1024),
    "attention, pages of 16": attend(MIXED, (16, 2), 256, page_tokens=16),
    "attention, window, pages of 16": attend(MIXED, (16, 2), 256, page_tokens=16, window=128),
    "attention, float32": attend(MIXED, (16, 2), 256, dtype=torch.float32),
    "attention, decode, FP8": attend([1] * 32, (32, 8), 128, coded=True),
    "attention, mixed, FP8": attend(MIXED, (32, 8), 128, coded=True),
    "attention, mixed, dim 256, FP8": attend(MIXED, (16, 2), 256, coded=True),
    "attention, window, dim 64, FP8": attend(MIXED, (64, 8), 64, window=128, coded=True),
    "latents, decode": attend([1] * 32, (128, 1), 576, latent=True),
    "latents, mixed": attend(MIXED, (128, 1), 576, latent=True),
    "latents, decode, FP8": attend([1] * 32, (128, 1), 576, coded=True, latent=True),
    "latents, mixed, FP8": attend(MIXED, (128, 1), 576, coded=True, latent=True),
    "latents, mixed, 16 heads": attend(MIXED, (16, 1), 576, latent=True),
    "draws": draw_tokens,
    "elementwise": run_elementwise,
    "linear layer, decode": recur([1] * 64, 1, 16, 128),
    "linear layer, mixed": recur([1, 12, 2000], 1, 16, 128),
    "linear layer, mixed, states of 12 tokens": recur([1, 12, 2000], 12, 16, 128),
    "linear layer, mixed, states of 2000 tokens": recur([1, 12, 2000], 2000, 16, 128),
    "linear layer, mixed, dim 64": recur([1, 12, 2000], 1, 16, 64),
    "linear layer, mixed, dim 256": recur([1, 12, 2000], 1, 4, 256),
    "linear layer, decode, bfloat16 states": recur([1] * 64, 1, 16, 128, torch.bfloat16),
    "linear layer, mixed, bfloat16 states": recur([1, 12, 2000], 1, 16, 128, torch.bfloat16),
    "linear layer, mixed, bfloat16 states inside": recur([1, 12, 2000], 2000, 16, 128, torch.bfloat16),
    "mamba2, decode": scan([1] * 64, 1, 8, 6, (128, 64)),
    "mamba2, mixed": scan([1, 12, 2000], 1, 8, 6, (128, 64)),
    "mamba2, mixed, dims 256 and 80": scan([1, 12, 2000], 1, 1, 3, (256, 80)),
    "mamba2, mixed, states of 12 tokens": scan([1, 12, 2000], 12, 8, 6, (128, 64)),
    "mamba2, mixed, states of 2000 tokens": scan([1, 12, 2000], 2000, 8, 6, (128, 64)),
    "mamba2, states of 2000 tokens, dims 256 and 80": scan([1, 12, 2000], 2000, 1, 3, (256, 80)),
    "mamba2, decode, bfloat16 states": scan([1] * 64, 1, 8, 6, (128, 64), torch.bfloat16),
    "mamba2, mixed, bfloat16 states": scan([1, 12, 2000], 1, 8, 6, (128, 64), torch.bfloat16),
    "mamba2, mixed, bfloat16 states inside": scan([1, 12, 2000], 2000, 8, 6, (128, 64), torch.bfloat16),
    "moe of 32 tokens": run_experts(32),
    "moe of 64 tokens": run_experts(64),
    "moe of 512 tokens": run_experts(512),
    "moe of 2048 tokens": run_experts(2048),
    "moe of 3072 tokens": run_experts(3072),
    "moe with biases": run_biased_experts,
}
# Kernels that must use them.
WGMMA: set[str] = {"attend_rows", "attend_tile", "gate_up_tile", "down_tile", "prepare", "advance", "answer"}
TMA: set[str] = {"attend_span", "attend_rows", "attend_tile"}
# Launches that cannot: no matrix unit takes float32, registers hold no sums of latents for the 64 queries of
# wgmma, and the copy engine takes tiles of one page.
WITHOUT_WGMMA = {"attention, float32", "latents, mixed", "latents, mixed, FP8", "latents, mixed, 16 heads"}
WITHOUT_TMA = {"attention, float32", "attention, pages of 16", "attention, window, pages of 16"}


SPILLED_MAX = 32
"""Bytes of a thread on smaller devices, and of FP8 pages before Triton 3.7."""

TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])


@pytest.mark.parametrize("name", LAUNCHES)
def test_fits_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(monkeypatch) as kernels:
        LAUNCHES[name]()
    assert kernels
    spilled_max = SPILLED_MAX if name.endswith("FP8") and TRITON < (3, 7) else 0
    wgmma = WGMMA if name not in WITHOUT_WGMMA else set[str]()
    tma = TMA if name not in WITHOUT_TMA else set[str]()
    for kernel in kernels:
        assert kernel.stack_bytes <= spilled_max, kernel
        assert kernel.shared_bytes <= SHARED_BYTES_MAX[90], kernel
        assert (kernel.wgmma > 0) >= (kernel.name in wgmma), kernel
        assert (kernel.tma > 0) >= (kernel.name in tma), kernel


OUT, DEPTH = 320, 2048
FORMATS: dict[str, tuple[Kind, int, torch.dtype, bool, float]] = {
    "INT8 per channel": ("int8", DEPTH, torch.float32, False, 0.501),
    "INT8 with INT8 inputs": ("w8a8", DEPTH, torch.float32, False, 0.501),
    "FP8 in blocks": ("fp8", 128, torch.float32, False, 0.5156),
    "INT4 of compressed-tensors": ("int4", 128, torch.bfloat16, False, 0.2578),
    "AWQ": ("uint4", 128, torch.float16, True, 0.2734),
    "MXFP4": ("fp4", 32, torch.bfloat16, False, 0.2812),
    "NVFP4": ("fp4", 16, torch.float32, False, 0.375),
    "Q4_0": ("int4", 32, torch.float16, False, 0.2812),
}
"""The kind, columns of a group, a type that holds all scales, offsets, and the bytes that a product of one
row reads, over those of weights in bfloat16."""


def stored_as(name: str, rows: int = OUT, columns: int = DEPTH) -> Stored:
    kind, group, dtype, shifted, _ = FORMATS[name]
    part = stored(kind, rows, columns, min(group, columns), shifted=shifted)
    assert part.scales is not None
    return replace(part, scales=part.scales.to(dtype).float())


def on(packed: Packed, device: torch.device) -> Packed:
    parts: dict[str, Any] = {
        name: None if part is None else part.to(device)
        for name in ("data", "scales", "offsets")
        for part in (getattr(packed, name),)
    }
    return replace(packed, **parts)


@pytest.mark.parametrize("name", FORMATS)
def test_one_row_reads_codes_and_scales_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = linear_cuda.pack([stored_as(name)])
    parts = [part for part in (packed.data, packed.scales, packed.offsets) if part is not None]
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    assert num_bytes / (2 * OUT * DEPTH) == pytest.approx(FORMATS[name][4], abs=1e-4)
    with launching(monkeypatch) as launches:
        linear_cuda.linear(torch.empty(1, DEPTH, dtype=torch.bfloat16, device=META), on(packed, META))
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        *([("quantise_row", (1,))] if packed.kind == "w8a8" else []),
        ("product_tile", (1, OUT // 64, 4)),  # each program has its rows and its columns
        ("add_spans", (1,)),
    ]


@pytest.mark.parametrize("capability", SHARED_BYTES_MAX)
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_fit_without_spills(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one row and of a prompt, and the experts of 20 tokens and of a prompt."""
    count, width, inner = 4, 512, 256
    gate_up, down = (
        linear_cuda.pack(
            [stored_as(name, count * out, depth).moved(lambda rows: rows.unflatten(0, (count, -1)))]
        )
        for out, depth in ((2 * inner, width), (width, inner))
    )
    weight = linear_cuda.pack([stored_as(name)])
    with compiling(monkeypatch, capability) as kernels:
        for tokens in (1, 8192):
            linear_cuda.linear(torch.zeros(tokens, DEPTH, dtype=torch.bfloat16), weight)
        for tokens in (20, 200):
            x_TH = torch.zeros(tokens, width, dtype=torch.bfloat16)
            choice = moe_cuda.route(x_TH[:, :count], Routing(2, renormalise=True))
            hidden_TKI = moe_cuda.moe_inner(x_TH, choice, Experts(gate_up, down))
            moe_cuda.moe_outer(hidden_TKI, choice, Experts(gate_up, down), None, None)
    assert {"product_tile", "gate_up_tile", "down_tile"} <= {kernel.name for kernel in kernels}
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES_MAX[capability], kernel
        assert (kernel.wgmma > 0) == (capability == 90 and kernel.name.endswith("_tile")), kernel


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize(
    "name",
    [
        "attention, mixed",
        "attention, mixed, dim 128",
        "latents, mixed",
        "moe of 3072 tokens",
        "linear layer, mixed",
    ],
)
def test_fits_smaller_devices(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "shared_bytes", lambda: SHARED_BYTES_MAX[capability])
    with compiling(monkeypatch, capability) as kernels:
        LAUNCHES[name]()
    assert kernels
    for kernel in kernels:
        assert kernel.stack_bytes <= SPILLED_MAX, kernel
        assert kernel.shared_bytes <= SHARED_BYTES_MAX[capability], kernel
