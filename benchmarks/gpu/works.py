"""The cases of `gpu_kernels`: each operator at the sizes of a layer of Qwen3-Next-80B-A3B, and its peers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch.nn import functional

from benchmarks.kernels import PAGE_TOKENS, step_inputs
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.draw.tables import DrawField, scale_of
from tidemill.kernels.linear.stored import FOUR_BITS, CodeKind, Stored, plain
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing
from tidemill.kvstore.layout import Attention, layout_of
from tidemill.workers.models.inputs import Inputs, caches_of

Call = Callable[[], object]

STREAMS_MAX = 512  # more tokens than these are a prompt's, whose products should reach half of the peak
MANY = 32  # rows from which on a step should reach the memory's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer, and the steps it is timed in."""

    hidden: int = 2048
    q_heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    layers: int = 12  # of attention, whose pages lie between each other
    key_heads: int = 16
    value_heads: int = 32  # of all key heads together
    key_dim: int = 128
    experts: int = 512
    top_k: int = 10
    inner: int = 512
    batches: tuple[int, ...] = (1, 8, 32, 64, 256)
    context: int = 4096
    prompts: tuple[int, ...] = (2048, 8192)
    vocabulary: int = 151_936
    drawn: int = 128  # rows that draw
    mamba_heads: int = 128
    latent: int = 576

    @property
    def channels(self) -> int:
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.key_dim


TINY = Shape(
    hidden=64, q_heads=4, head_dim=32, layers=2, key_heads=2, value_heads=4, key_dim=16, experts=4, top_k=2,
    inner=32, batches=(2,), context=70, prompts=(70,),
    vocabulary=999, drawn=3, mamba_heads=4, latent=48,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """`num_bytes` and `flops` are the least that the operator must move and compute. `goal`: the share of the
    roofline that is wanted, or a speed at least that of all peers."""

    name: str
    call: Call
    num_bytes: float
    flops: float = 0.0
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    goal: float | Literal["peers"] | None = None


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pages_for(shape: Shape, rows: Inputs) -> torch.Tensor:
    """The middle layer of an arena that the rows' pages fill."""
    specs = (Attention(kv_heads=shape.kv_heads, head_dim=shape.head_dim),) * shape.layers
    layout = layout_of(specs, PAGE_TOKENS, "bfloat16")
    extents = -(-rows.pages_BN.numel() // layout.pages_per_extent)
    arena = torch.empty(extents * layout.extent_bytes, dtype=torch.uint8)
    arena.view(torch.bfloat16).normal_()
    return caches_of(layout, arena).plain_kv[shape.layers // 2]


def attention(shape: Shape, ops: Operators, new: int, before: int, batch: int) -> Work:
    rows = step_inputs([new] * batch, [before] * batch)
    cache, heads, dim = pages_for(shape, rows), shape.q_heads, shape.head_dim
    q_THD = normal(new * batch, heads, dim)
    length = new + before
    keys = new * before + new * (new + 1) // 2  # of all queries of a row and head
    row_bytes = length * shape.kv_heads * 2 * dim * 2

    def sdpa() -> Call:
        kv = (
            cache[rows.pages_BN.long()].permute(3, 0, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :length].contiguous()
        )
        q = q_THD.view(batch, new, heads, dim).transpose(1, 2).contiguous()
        causal = not before
        assert causal or new == 1
        return lambda: functional.scaled_dot_product_attention(
            q, kv[0], kv[1], is_causal=causal, enable_gqa=True
        )

    def flashinfer() -> Call:
        import flashinfer as library  # noqa: PLC0415 - not everywhere

        indptr = torch.arange(batch + 1, dtype=torch.int32) * rows.pages_BN.shape[1]
        last = torch.full((batch,), (length - 1) % PAGE_TOKENS + 1, dtype=torch.int32)
        numbers = (heads, shape.kv_heads, dim, PAGE_TOKENS)
        space, types = torch.empty(256 << 20, dtype=torch.uint8), {"q_data_type": torch.bfloat16}
        indices = rows.pages_BN.flatten()
        if new == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, *numbers, **types)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
            starts = torch.arange(batch + 1, dtype=torch.int32) * new
            wrapper.plan(starts, indptr, indices, last, *numbers, causal=True, **types)
        return lambda: wrapper.run(q_THD, (cache[:, :, 0], cache[:, :, 1]))

    return Work(
        f"attention {batch} x {new} after {before}",
        lambda: ops.attention(q_THD, cache, rows, None, None),
        2 * size_of(q_THD) + batch * row_bytes,
        4.0 * batch * keys * heads * dim,
        {"flashinfer": flashinfer} | ({} if before and new > 1 else {"sdpa": sdpa}),
        goal=0.8 if new == 1 and batch >= MANY and length >= 4096 else None,
    )


def gated_delta(shape: Shape, ops: Operators, new: int, batch: int) -> Work:
    groups, heads, dim = shape.key_heads, shape.value_heads, shape.key_dim
    rows, tokens = step_inputs([new] * batch, [0] * batch), new * batch
    mixed, gates = normal(tokens, groups, shape.channels), normal(tokens, 2 * heads)
    a_log, dt_bias = normal(2, heads, dtype=torch.float32)
    state = normal(batch, groups, heads // groups, dim, dim, dtype=torch.float32)

    def fla() -> Call:
        from fla.ops import gated_delta_rule as library  # noqa: PLC0415 - not everywhere

        run = library.fused_recurrent_gated_delta_rule if new == 1 else library.chunk_gated_delta_rule
        q, k, v = (normal(batch, new, count, dim) for count in (groups, groups, heads))
        g, beta = (
            functional.logsigmoid(normal(batch, new, heads)).float(),
            normal(batch, new, heads).sigmoid(),
        )
        return lambda: run(
            q, k, v, g=g, beta=beta, initial_state=state.flatten(1, 2), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return Work(
        f"gated_delta {batch} x {new}",
        lambda: ops.gated_delta(mixed, gates, a_log, dt_bias, state, rows),
        size_of(mixed, gates) + 2 * size_of(state) + tokens * heads * dim * 2,
        8.0 * tokens * heads * dim * dim,  # the recurrence's; chunks trade more of them for the matrix units
        {"fla": fla},
        goal="peers" if new > 1 else 0.8 if batch >= MANY else None,
    )


def causal_conv(shape: Shape, ops: Operators, new: int, batch: int) -> Work:
    rows, x = step_inputs([new] * batch, [0] * batch), normal(new * batch, shape.key_heads, shape.channels)
    weight = normal(4, shape.key_heads, shape.channels, dtype=torch.float32)
    window = normal(batch, shape.key_heads, 3, shape.channels, dtype=torch.float32)
    num_bytes = 2 * size_of(x, window)
    return Work(
        f"causal_conv {batch} x {new}", lambda: ops.causal_conv(x, weight, None, window, rows), num_bytes
    )


def rope_store(shape: Shape, ops: Operators, new: int, batch: int) -> Work:
    rows, dim = step_inputs([new] * batch, [0] * batch), shape.head_dim
    cache, tokens = pages_for(shape, rows), new * batch
    q, k, v = (normal(tokens, heads, dim) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads))
    weight, frequencies = normal(dim, dtype=torch.float32), torch.rand(dim // 8)
    angles = ops.rope_angles(rows.positions_T, frequencies)
    return Work(
        f"rope_store {batch} x {new}",
        lambda: ops.rope_store(q, k, v, weight, weight, 1e-6, angles, cache, rows),
        2 * size_of(q, k, v) + size_of(angles),
    )


def elementwise(shape: Shape, ops: Operators, tokens: int) -> Iterator[Work]:
    x, weight = normal(tokens, shape.hidden), normal(shape.hidden, dtype=torch.float32)
    residual = torch.zeros(tokens, shape.hidden)
    yield Work(
        f"add_norm {tokens}",
        lambda: ops.add_norm(residual, x, weight, 1e-6),
        2 * size_of(x, residual),
    )
    values = normal(tokens, shape.key_heads, shape.value_heads // shape.key_heads, shape.key_dim)
    norm = normal(shape.key_dim, dtype=torch.float32)
    yield Work(
        f"rms_norm_gated {tokens}",
        lambda: ops.rms_norm_gated(values, values, norm, 1e-6),
        3 * size_of(values),
    )
    gate_up = normal(tokens, 2 * shape.inner)
    yield Work(f"silu_mul {tokens}", lambda: ops.silu_mul(gate_up), 1.5 * size_of(gate_up))
    heads = normal(tokens, shape.q_heads, shape.head_dim)
    yield Work(f"sigmoid_mul {tokens}", lambda: ops.sigmoid_mul(heads, heads), 3 * size_of(heads))


def product_goal(tokens: int) -> float | None:
    """Return the share of the roofline that the weights' products of a step should reach."""
    return 0.8 if MANY <= tokens <= STREAMS_MAX else 0.5 if tokens > STREAMS_MAX else None


def linear(shape: Shape, ops: Operators, tokens: int) -> Work:
    out = shape.key_heads * (shape.channels + shape.value_heads // shape.key_heads * shape.key_dim)
    x, weight = normal(tokens, shape.hidden), normal(out, shape.hidden)
    packed = ops.pack([plain(weight)], None)
    num_bytes = size_of(x, weight) + 2 * tokens * out
    flops = 2.0 * tokens * out * shape.hidden
    return Work(
        f"linear {tokens} -> {out}",
        lambda: ops.linear(x, packed),
        num_bytes,
        flops,
        goal=product_goal(tokens),
    )


def codes(shape: Shape, ops: Operators, kind: CodeKind, tokens: int) -> Work:
    """The same product with codes in groups of 32 columns."""
    out = shape.key_heads * (shape.channels + shape.value_heads // shape.key_heads * shape.key_dim)
    width = shape.hidden // 2 if kind in FOUR_BITS else shape.hidden
    raw = torch.randint(0, 119, (out, width), dtype=torch.uint8)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    scales = torch.full((out, shape.hidden // 32), 2.0**-8)
    x, packed = normal(tokens, shape.hidden), ops.pack([Stored(raw.view(dtype), kind, scales)], None)
    assert packed.scales is not None
    return Work(
        f"linear {tokens} -> {out}, {kind}",
        lambda: ops.linear(x, packed),
        size_of(x, packed.data, packed.scales) + 2 * tokens * out,
        2.0 * tokens * out * shape.hidden,
    )


def moe(shape: Shape, ops: Operators, experts: Experts, tokens: int) -> Iterator[Work]:
    """Each expert that some token chose is read once."""
    x, logits = normal(tokens, shape.hidden), normal(tokens, shape.experts)
    routing = Routing(shape.top_k, renormalise=True)
    choice = ops.route(logits, routing)
    hidden = ops.moe_inner(x, choice, experts)
    read, pairs, expert = len(choice.experts_TK.unique()), tokens * shape.top_k, shape.inner * shape.hidden
    yield Work(f"route {tokens}", lambda: ops.route(logits, routing), size_of(logits, *choice[:2]))
    yield Work(
        f"moe_inner {tokens}, {read} experts",
        lambda: ops.moe_inner(x, choice, experts),
        read * 4 * expert + size_of(x, hidden),
        4.0 * pairs * expert,
    )
    yield Work(
        f"moe_outer {tokens}, {read} experts",
        lambda: ops.moe_outer(hidden, choice, experts, x, logits[:, :1]),
        read * 2 * expert + size_of(x, x, hidden),
        2.0 * pairs * expert,
    )

    def vllm() -> Call:
        import fused_moe as library  # noqa: PLC0415 - in the folder of peers, where there is one

        w1, w2 = experts.gate_up.data, experts.down.data
        weights, ids = torch.softmax(logits.float(), -1).topk(shape.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        return lambda: library.fused_experts(x, w1, w2, weights, ids.int())

    yield Work(
        f"both products of {tokens}, {read} experts",
        lambda: ops.moe_outer(ops.moe_inner(x, choice, experts), choice, experts, x, logits[:, :1]),
        read * 6 * expert + size_of(x, x, hidden, hidden),
        6.0 * pairs * expert,
        {"vllm": vllm},
        goal=product_goal(tokens),
    )


def draws(shape: Shape, ops: Operators, rows: int, temperature: float, top_p: float) -> Work:
    """The draw of each row, which reads its scores once or, with filters, some times."""
    logits = normal(rows, shape.vocabulary, dtype=torch.float32)
    numbers, filtered = torch.zeros(rows, len(DrawField), dtype=torch.float64), rows if top_p < 1 else 0
    numbers[:, DrawField.SOURCE] = torch.arange(rows)
    numbers[:, DrawField.ROOM] = torch.arange(rows) if filtered else -1
    numbers[:, DrawField.SCALE], numbers[:, DrawField.TOP_P] = scale_of(temperature), top_p
    numbers[:, DrawField.UNIFORM] = 0.5
    name = "greedy" if not temperature else f"top-p {top_p}" if filtered else "temperature"
    return Work(f"draw {rows}, {name}", lambda: ops.draw(logits, logits, numbers, filtered), size_of(logits))


def router(shape: Shape, ops: Operators, tokens: int) -> Work:
    x, weight = normal(tokens, shape.hidden), normal(shape.experts, shape.hidden)
    packed = ops.pack([plain(weight)], None)
    return Work(
        f"scores of {shape.experts} experts for {tokens}",
        lambda: ops.logits(x, packed),
        size_of(x, weight) + 4 * tokens * shape.experts,
        2.0 * tokens * shape.experts * shape.hidden,
    )


def mamba2(shape: Shape, ops: Operators, new: int, batch: int) -> Work:
    """A recurrent layer of Granite 4."""
    groups, heads, key_dim, value_dim = 1, shape.mamba_heads, shape.key_dim, shape.key_dim // 2
    rows, tokens = step_inputs([new] * batch, [0] * batch), new * batch
    mixed = normal(tokens, groups, 2 * key_dim + heads * value_dim)
    gate, steps = normal(tokens, groups, heads, value_dim), normal(tokens, heads)
    per_head = normal(heads, dtype=torch.float32)
    state = normal(batch, groups, heads, key_dim, value_dim, dtype=torch.float32)
    constants = Heads(per_head, per_head, per_head, 0.0, float("inf"))
    return Work(
        f"mamba2 {batch} x {new}",
        lambda: ops.mamba2(mixed, gate, steps, constants, state, rows),
        size_of(mixed, gate, gate, steps) + 2 * size_of(state),
        6.0 * tokens * heads * key_dim * value_dim,
    )


def other_attention(shape: Shape, ops: Operators) -> Iterator[Work]:
    """A window with sinks (gpt-oss), latents (DeepSeek-V3), guesses, and a chunk behind a long prefix."""
    few = shape.batches[min(1, len(shape.batches) - 1)]
    rows = step_inputs([1] * few, [shape.context - 1] * few)
    windowed = replace(shape, q_heads=shape.q_heads * 4, kv_heads=shape.kv_heads * 4, head_dim=64)
    cache, window = pages_for(windowed, rows), min(128, shape.context)
    q_THD, sinks_H = normal(few, windowed.q_heads, 64), normal(windowed.q_heads, dtype=torch.float32)
    yield Work(
        f"attention {few} x 1, window of {window}",
        lambda: ops.attention(q_THD, cache, rows, window, sinks_H),
        2 * size_of(q_THD) + few * window * windowed.kv_heads * 2 * 64 * 2,
    )
    latents = torch.randn(rows.pages_BN.numel() + 1, 1, 1, PAGE_TOKENS, shape.latent, dtype=torch.bfloat16)
    absorbed = normal(few, shape.q_heads * 2, shape.latent)
    yield Work(
        f"latents {few} x 1 after {shape.context - 1}",
        lambda: ops.attention(absorbed, latents, rows, None, None),
        2 * size_of(absorbed) + few * shape.context * shape.latent * 2,
    )
    yield replace(attention(shape, ops, 5, 8 * shape.context, 1), peers={})
    yield replace(attention(shape, ops, shape.prompts[0] // 4, 25 * shape.context, 1), peers={})


def works(shape: Shape, ops: Operators) -> Iterator[Work]:
    """Decode, then prompts: what is timed when time is short comes first."""
    gate_up = ops.pack([plain(normal(shape.experts, 2 * shape.inner, shape.hidden))], None)
    down = ops.pack([plain(normal(shape.experts, shape.hidden, shape.inner))], None)
    experts = Experts(gate_up, down)
    for batch in shape.batches:
        yield from moe(shape, ops, experts, batch)
        yield attention(shape, ops, 1, shape.context - 1, batch)
        yield gated_delta(shape, ops, 1, batch)
    for tokens in shape.prompts:
        yield from moe(shape, ops, experts, tokens)
        yield attention(shape, ops, tokens, 0, 1)
        yield gated_delta(shape, ops, tokens, 1)
        yield causal_conv(shape, ops, tokens, 1)
        yield rope_store(shape, ops, tokens, 1)
        yield linear(shape, ops, tokens)
        yield from elementwise(shape, ops, tokens)
    for rows in (shape.batches[0], shape.drawn):
        for temperature, top_p in ((0.0, 1.0), (0.8, 1.0), (0.8, 0.95)):
            yield draws(shape, ops, rows, temperature, top_p)
    for tokens in (shape.drawn, shape.prompts[-1]):
        yield router(shape, ops, tokens)
    for kind, tokens in product(get_args(CodeKind), (shape.batches[0], shape.prompts[0])):
        yield codes(shape, ops, kind, tokens)
    yield from other_attention(shape, ops)
    yield mamba2(shape, ops, 1, shape.batches[-1])
    yield mamba2(shape, ops, shape.prompts[0], 1)
    yield attention(shape, ops, shape.prompts[0] // 4, shape.context, 4)
    for batch in (shape.batches[0], shape.batches[-1]):
        yield causal_conv(shape, ops, 1, batch)
        yield rope_store(shape, ops, 1, batch)
        yield linear(shape, ops, batch)
        yield from elementwise(shape, ops, batch)
