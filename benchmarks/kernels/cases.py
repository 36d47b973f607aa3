"""The operators at the sizes of small models, with what each must move and compute at least."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.clock import Call
from benchmarks.kernels.shapes import PAGE_TOKENS, step_inputs
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.draw.tables import scale_of
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing

PACKED_TOKENS = 72  # of a page whose keys are packed: no multiple of the rows of AMX
DELTA_FLOPS = 8.0  # of each element of a state and token: decay, k S, the outer product, q S
MAMBA2_FLOPS = 6.0  # the same without k S


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator at one size: `run(operators)` prepares its inputs and returns the call to time."""

    operator: str
    size: dict[str, int]
    num_bytes: float
    flops: float
    run: Callable[[Operators], Call]
    torch: Call | None = None
    half: bool = False  # products are bfloat16


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def linear(rows: int, width: int, out: int, dtype: torch.dtype) -> Case:
    x, weight = torch.randn(rows, width), torch.randn(out, width).to(dtype)
    wide = weight.float()

    def run(ops: Operators) -> Call:
        packed = ops.pack([plain(weight)], None)
        return lambda: ops.linear(x, packed)

    return Case(
        operator="linear",
        size={"rows": rows, "width": width, "out": out, "half": int(dtype == torch.bfloat16)},
        num_bytes=size_of(x, weight) + 4 * rows * out,
        flops=2.0 * rows * width * out,
        run=run,
        torch=lambda: functional.linear(x, wide),
    )


def attention(new: int, before: int, batch: int, heads: tuple[int, int], dim: int, **kind: int) -> Case:
    """`half`: pages and products are bfloat16, of which a page of `page` tokens, no multiple of 16, is
    packed."""
    page, half = kind.get("page", PAGE_TOKENS), kind.get("half", 0)
    inputs = step_inputs([new] * batch, [before] * batch, page)
    cache = torch.randn(inputs.pages_BN.numel(), heads[1], 2, page, dim)
    cache = cache.bfloat16() if half else cache
    q_THD = torch.randn(new * batch, heads[0], dim)
    seen = torch.ones(new, new + before, dtype=torch.bool).tril(before)
    length = new + before

    def peer() -> None:
        for b in range(batch):
            kv = cache[inputs.pages_BN[b].long()].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
            q = q_THD[b * new : (b + 1) * new].transpose(0, 1).to(cache.dtype)
            functional.scaled_dot_product_attention(q[None], kv[:1], kv[1:], attn_mask=seen, enable_gqa=True)

    return Case(
        operator="attention",
        size={
            "new": new, "before": before, "batch": batch, "heads": heads[0], "kv_heads": heads[1], "dim": dim,
            **kind,
        },
        num_bytes=2 * size_of(q_THD) + cache.element_size() * batch * length * heads[1] * 2 * dim,
        flops=4.0 * batch * heads[0] * dim * (new * before + new * (new + 1) / 2),
        run=lambda ops: lambda: ops.attention(q_THD, cache, inputs, None, None),
        torch=peer,
        half=bool(half),
    )  # fmt: skip


def delta(new: int, batch: int, groups: int, heads: int, dim: int) -> Iterator[Case]:
    inputs = step_inputs([new] * batch, [0] * batch)
    tokens, channels = new * batch, (2 + heads) * dim
    mixed, gates = torch.randn(tokens, groups, channels), torch.randn(tokens, 2 * groups * heads)
    a_log, dt_bias = torch.randn(2, groups * heads)
    state = torch.randn(batch, groups, heads, dim, dim)
    weight, window = torch.randn(4, groups, channels), torch.randn(batch, groups, 3, channels)
    size = {"new": new, "batch": batch, "groups": groups, "heads": heads, "dim": dim}
    yield Case(
        operator="gated_delta",
        size=size,
        num_bytes=size_of(mixed, gates) + 2 * size_of(state) + 4 * tokens * groups * heads * dim,
        flops=DELTA_FLOPS * tokens * groups * heads * dim * dim,
        run=lambda ops: lambda: ops.gated_delta(mixed, gates, a_log, dt_bias, state, inputs),
    )
    x = torch.cat(
        [window[0].expand(batch, -1, -1, -1).transpose(1, 2), mixed.view(batch, new, groups, -1)], 1
    )
    x_BCT = x.flatten(2).transpose(1, 2).contiguous()
    taps = weight.flatten(1).t()[:, None].contiguous()
    yield Case(
        operator="causal_conv",
        size=size,
        num_bytes=2 * size_of(mixed, window),
        flops=12.0 * mixed.numel(),
        run=lambda ops: lambda: ops.causal_conv(mixed, weight, None, window, inputs),
        torch=lambda: functional.silu(functional.conv1d(x_BCT, taps, groups=len(taps))),
    )


def mamba2(new: int, batch: int, groups: int, heads: int, dims: tuple[int, int]) -> Case:
    inputs, (key_dim, value_dim) = step_inputs([new] * batch, [0] * batch), dims
    mixed = torch.randn(new * batch, groups, 2 * key_dim + heads * value_dim)
    z, dt = torch.randn(new * batch, groups, heads, value_dim), torch.randn(new * batch, groups * heads)
    a_log, dt_bias, skip = torch.randn(3, groups * heads).unbind()
    weights = Heads(a_log, dt_bias, skip, dt_min=0.0, dt_max=float("inf"))
    state = torch.randn(batch, groups, heads, key_dim, value_dim)
    return Case(
        operator="mamba2",
        size={"new": new, "batch": batch, "groups": groups, "heads": heads, "key": key_dim, "dim": value_dim},
        num_bytes=size_of(mixed, z, z, dt) + 2 * size_of(state),
        flops=MAMBA2_FLOPS * new * state.numel(),
        run=lambda ops: lambda: ops.mamba2(mixed, z, dt, weights, state, inputs),
    )


def elementwise(rows: int, width: int) -> Iterator[Case]:
    x, residual, pair = torch.randn(rows, width), torch.zeros(rows, width), torch.randn(rows, 2 * width)
    weight, heads, size = torch.randn(width), x.view(rows, -1, 64), {"rows": rows, "width": width}
    yield Case(
        operator="add_norm",
        size=size,
        num_bytes=4 * size_of(x),
        flops=5.0 * x.numel(),
        run=lambda ops: lambda: ops.add_norm(residual, x, weight, 1e-6),
        torch=lambda: functional.rms_norm(residual + x, (width,), weight, 1e-6),
    )
    yield Case(
        operator="silu_mul",
        size=size,
        num_bytes=3 * size_of(x),
        flops=20.0 * x.numel(),
        run=lambda ops: lambda: ops.silu_mul(pair),
        torch=lambda: functional.silu(pair[:, :width]) * pair[:, width:],
    )
    yield Case(
        operator="sigmoid_mul",
        size=size,
        num_bytes=3 * size_of(x),
        flops=20.0 * x.numel(),
        run=lambda ops: lambda: ops.sigmoid_mul(heads, heads),
        torch=lambda: torch.sigmoid(heads) * heads,
    )


def moe(rows: int, experts: int, top_k: int, width: int, inner: int) -> Case:
    x, logits = torch.randn(rows, width), torch.randn(rows, experts)
    gate_up, down = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)
    read = len(logits.topk(top_k).indices.unique())

    def run(ops: Operators) -> Call:
        weights, routing = (
            Experts(ops.pack([plain(gate_up)], None), ops.pack([plain(down)], None)),
            Routing(top_k, renormalise=True),
        )

        def call() -> Tensor:
            choice = ops.route(logits, routing)
            return ops.moe_outer(ops.moe_inner(x, choice, weights), choice, weights, None, None)

        return call

    return Case(
        operator="moe",
        size={"rows": rows, "experts": experts, "top_k": top_k, "width": width, "inner": inner},
        num_bytes=size_of(x, x, logits) + 4 * read * 3 * inner * width,
        flops=6.0 * rows * top_k * inner * width,
        run=run,
    )


def rope(rows: int, heads: tuple[int, int], dim: int) -> Case:
    inputs = step_inputs([rows], [0])
    cache = torch.randn(inputs.pages_BN.numel(), heads[1], 2, PAGE_TOKENS, dim)
    q, k, v = (torch.randn(rows, count, dim) for count in (heads[0], heads[1], heads[1]))
    weight, angles = torch.randn(dim), torch.randn(rows, 2, dim // 8)
    return Case(
        operator="rope_store",
        size={"rows": rows, "heads": heads[0], "kv_heads": heads[1], "dim": dim},
        num_bytes=2 * size_of(q, k, v) + size_of(angles),
        flops=6.0 * (q.numel() + k.numel()),
        run=lambda ops: lambda: ops.rope_store(q, k, v, weight, weight, 1e-6, angles, cache, inputs),
    )


def draw(rows: int, vocabulary: int, temperature: float, top_p: float) -> Case:
    logits, uniform = 3 * torch.randn(rows, vocabulary), torch.rand(rows, 1)
    filtered = rows if top_p < 1 else 0
    entries = [
        (row, scale_of(temperature), float(uniform[row]), row if filtered else -1, 0, top_p, 0)
        for row in range(rows)
    ]
    draws = torch.tensor(entries, dtype=torch.float64)

    def peer() -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        weights, ids = (logits / temperature).softmax(-1), None
        if filtered:
            weights, ids = weights.sort(-1, descending=True)
            weights = weights * (weights.cumsum(-1) - weights < top_p)
        sums = weights.cumsum(-1)
        places = torch.searchsorted(sums, uniform * sums[:, -1:]).clamp(max=vocabulary - 1)
        return places if ids is None else ids.gather(-1, places)

    return Case(
        operator="draw",
        size={
            "rows": rows,
            "vocabulary": vocabulary,
            "temperature": temperature > 0,
            "top_p": filtered > 0,
        },
        num_bytes=size_of(logits),
        flops=0.0,
        run=lambda ops: lambda: ops.draw(logits, logits[:0], draws, filtered),
        torch=peer,
    )


def prompts() -> Iterator[Case]:
    """Yield attention of prompts in bfloat16, with keys where they lie and packed."""
    for new, before, batch in ((512, 0, 1), (2048, 0, 1), (8192, 0, 1), (512, 7488, 1), (128, 0, 4)):
        for page in (PAGE_TOKENS, PACKED_TOKENS):
            yield attention(new, before, batch, (12, 4), 64, half=1, page=page)
    for dim in (128, 64):
        yield attention(2048, 0, 1, (8, 2), dim, half=1)


def cases() -> Iterator[Case]:
    """Yield the calls of a step of the hybrid, decode and prefill, and attention and experts of other
    sizes."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 8, 32, 512):
            yield linear(rows, 768, 2048, dtype)
            yield linear(rows, 768, 32_000, dtype)
    for new, before, batch in ((1, 511, 1), (1, 511, 32), (1, 4095, 1), (512, 0, 1), (64, 960, 1)):
        yield attention(new, before, batch, (8, 2), 128)
    yield from prompts()
    for new, batch in ((1, 1), (1, 8), (1, 32), (512, 1), (2048, 1)):
        for groups, heads, dim in ((6, 2, 64), (4, 2, 128)):
            yield from delta(new, batch, groups, heads, dim)
        yield mamba2(new, batch, 8, 2, (128, 64))
    for rows in (1, 32, 512):
        yield from elementwise(rows, 768)
        yield rope(rows, (8, 2), 128)
        yield moe(rows, 16, 4, 512, 256)
    for temperature, top_p in ((0.0, 1.0), (0.8, 1.0), (0.8, 0.95)):
        yield draw(128, 151_936, temperature, top_p)
