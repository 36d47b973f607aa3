"""CPU time of every operator and of whole models: ours against the definition, torch and transformers.

    python -m benchmarks.kernels [--cache-dir DIR] [--quick]

Times are CPU seconds of one thread, the best of a few runs, so that a busy machine disturbs them little.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch.nn import functional

from tidemill.kernels.dispatch import REFERENCE, Operators, operators
from tidemill.kernels.moe.experts import Experts
from tidemill.kvstore.layout import layout_of
from tidemill.workers.inputs import Inputs, caches_of
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.registry import LoadedModel, load

PAGE_TOKENS = 64
HYBRID_80M: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size: `run(operators)` prepares its inputs and returns the call to time."""

    name: str
    run: Callable[[Operators], Callable[[], object]]
    torch_peer: Callable[[], object] | None = None


def seconds(call: Callable[[], object], budget_seconds: float) -> float:
    """CPU seconds of the fastest of at least two calls after a first one to warm up."""
    call()
    best, spent = float("inf"), 0.0
    for _ in range(100):
        start = time.process_time()
        call()
        took = time.process_time() - start
        best, spent = min(best, took), spent + took
        if spent > budget_seconds:
            break
    return best


def step_inputs(new: list[int], before: list[int]) -> Inputs:
    """Rows of `new` tokens after `before`, with pages and states of their own."""
    lens = [n + old for n, old in zip(new, before, strict=True)]
    width = -(-max(lens) // PAGE_TOKENS)
    cu = torch.tensor([0, *new]).cumsum(0)
    return Inputs(
        tokens_T=torch.arange(int(cu[-1])) % 800,
        positions_T=torch.cat([torch.arange(old, old + n) for n, old in zip(new, before, strict=True)]),
        cu_B1=cu.to(torch.int32),
        pages_BN=torch.randperm(len(new) * width).view(len(new), width).to(torch.int32),
        lens_B=torch.tensor(lens, dtype=torch.int32),
        read_B=torch.arange(len(new), dtype=torch.int32),
        writes_BK=torch.arange(len(new), dtype=torch.int32)[:, None],
    )


def linear_case(rows: int, out: int, width: int) -> Case:
    x, weight = torch.randn(rows, width), torch.randn(out, width)

    def run(ops: Operators) -> Callable[[], object]:
        packed = ops.pack(weight, None)
        return lambda: ops.linear(x, packed)

    return Case(f"linear {rows}x{width}->{out}", run, lambda: functional.linear(x, weight))


def attention_case(new: int, before: int, batch: int, heads: tuple[int, int], dim: int) -> Case:
    inputs = step_inputs([new] * batch, [before] * batch)
    cache = torch.randn(inputs.pages_BN.numel(), heads[1], 2, PAGE_TOKENS, dim)
    q_THD = torch.randn(new * batch, heads[0], dim)
    unseen = torch.ones(new, new + before, dtype=torch.bool).tril(before)

    def peer() -> None:
        for b in range(batch):
            kv = cache[inputs.pages_BN[b].long()].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : new + before]
            q = q_THD[b * new : (b + 1) * new].transpose(0, 1)
            functional.scaled_dot_product_attention(
                q[None], kv[:1], kv[1:], attn_mask=unseen, enable_gqa=True
            )

    name = f"attention {batch} rows of {new} after {before}, D {dim}"
    return Case(name, lambda ops: lambda: ops.attention(q_THD, cache, inputs), peer)


def delta_cases(new: int, batch: int, groups: int, heads: int, dim: int) -> Iterator[Case]:
    inputs = step_inputs([new] * batch, [0] * batch)
    tokens, channels = new * batch, (2 + heads) * dim
    mixed, gates = torch.randn(tokens, groups, channels), torch.randn(tokens, 2 * groups * heads)
    a_log, dt_bias = torch.randn(2, groups * heads)
    state = torch.randn(batch, groups, heads, dim, dim)
    weight, window = torch.randn(4, groups, channels), torch.randn(batch, groups, 3, channels)
    size = f"{batch} rows of {new}, {groups}x{heads} heads, D {dim}"
    yield Case(
        f"gated_delta {size}",
        lambda ops: lambda: ops.gated_delta(mixed, gates, a_log, dt_bias, state, inputs),
    )
    yield Case(f"causal_conv {size}", lambda ops: lambda: ops.causal_conv(mixed, weight, window, inputs))


def elementwise_cases(rows: int, width: int) -> Iterator[Case]:
    x, weight, pair = torch.randn(rows, width), torch.randn(width), torch.randn(rows, 2 * width)
    heads = x.view(rows, -1, 64)
    yield Case(
        f"rms_norm {rows}x{width}",
        lambda ops: lambda: ops.rms_norm(x, weight, 1e-6),
        lambda: functional.rms_norm(x, (width,), weight, 1e-6),
    )
    yield Case(
        f"silu_mul {rows}x{width}",
        lambda ops: lambda: ops.silu_mul(pair),
        lambda: functional.silu(pair[:, :width]) * pair[:, width:],
    )
    yield Case(f"sigmoid_mul {rows}x{width}", lambda ops: lambda: ops.sigmoid_mul(heads, heads))


def moe_case(rows: int, experts: int, top_k: int, width: int, inner: int) -> Case:
    x, logits = torch.randn(rows, width), torch.randn(rows, experts)
    gate_up, down = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)

    def run(ops: Operators) -> Callable[[], object]:
        weights = Experts(ops.pack(gate_up, None), ops.pack(down, None), top_k, renormalise=True)
        return lambda: ops.moe_outer(*ops.moe_inner(x, logits, weights), weights)

    return Case(f"moe {rows}x{width}, {top_k} of {experts} experts of {inner}", run)


def rope_case(rows: int, heads: tuple[int, int], dim: int) -> Case:
    inputs = step_inputs([rows], [0])
    cache = torch.randn(inputs.pages_BN.numel(), heads[1], 2, PAGE_TOKENS, dim)
    q, k, v = (
        torch.randn(rows, heads[0], dim),
        torch.randn(rows, heads[1], dim),
        torch.randn(rows, heads[1], dim),
    )
    weight, angles = torch.randn(dim), torch.randn(rows, 2, dim // 8)
    return Case(
        f"rope_store {rows} tokens, {heads[0]} + {heads[1]} heads, D {dim}",
        lambda ops: lambda: ops.rope_store(q, k, v, weight, weight, 1e-6, angles, cache, inputs),
    )


def operator_cases() -> Iterator[Case]:
    for rows in (1, 8, 32, 512):
        yield linear_case(rows, 2048, 768)
    for new, before, batch in ((1, 511, 1), (1, 511, 32), (512, 0, 1), (64, 960, 1)):
        yield attention_case(new, before, batch, (8, 2), 128)
    for new, batch in ((1, 1), (1, 32), (512, 1)):
        yield from delta_cases(new, batch, 8, 2, 64)
    for rows in (1, 512):
        yield from elementwise_cases(rows, 768)
        yield rope_case(rows, (8, 2), 128)
        yield moe_case(rows, 16, 4, 256, 128)


def print_operators(ours: Operators, budget_seconds: float) -> None:
    print(f"{'operator':52}{'cpu us':>10}{'x reference':>13}{'x torch':>10}")
    for case in operator_cases():
        own = seconds(case.run(ours), budget_seconds)
        reference = seconds(case.run(REFERENCE), budget_seconds) / own
        peer = f"{seconds(case.torch_peer, budget_seconds) / own:10.2f}" if case.torch_peer else ""
        print(f"{case.name:52}{own * 1e6:10.0f}{reference:13.2f}{peer}", flush=True)


def model_seconds(model: LoadedModel, new: int, before: int, batch: int, budget_seconds: float) -> float:
    """One step of `batch` rows with the logits of each row's last token."""
    layout = layout_of(model.layers, PAGE_TOKENS)
    inputs = step_inputs([new] * batch, [before] * batch)
    states = -(-batch // layout.states_per_extent)
    extents = states + -(-inputs.pages_BN.numel() // layout.pages_per_extent)
    caches = caches_of(layout, torch.zeros(extents * layout.extent_bytes, dtype=torch.uint8))
    inputs.pages_BN.add_(states * layout.pages_per_extent)
    last_B = inputs.cu_B1[1:].long() - 1
    return seconds(lambda: model.model.logits(model.model.forward(inputs, caches)[last_B]), budget_seconds)


def peer_seconds(peer: Any, new: int, before: int, batch: int, budget_seconds: float) -> float:  # noqa: ANN401
    """The same step in transformers; the first `before` tokens are not timed, its cache grows by call."""
    tokens = torch.arange(batch * (before + new)).view(batch, -1) % 800
    with torch.inference_mode():
        past = peer(tokens[:, :before], use_cache=True).past_key_values if before else None
        return seconds(
            lambda: peer(tokens[:, before:], past_key_values=past, use_cache=True, logits_to_keep=1),
            budget_seconds,
        )


def print_models(ours: Operators, budget_seconds: float) -> None:
    print(f"\n{'model and step':52}{'tokens/s':>10}{'transformers':>14}{'ratio':>8}")
    with TemporaryDirectory() as folder:
        config = transformers.Qwen3NextConfig(**HYBRID_80M)
        # In the type that models are published in; theirs computes in float32, which is faster here.
        transformers.Qwen3NextForCausalLM(config).bfloat16().save_pretrained(folder)
        for name, path in (("keeper", bundled()["keeper"]), ("hybrid-80m", Path(folder))):
            model = load(path, ours, lambda _done, _total: None)
            peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            steps = [(1, 512, batch) for batch in (1, 8, 32)] + [(length, 0, 1) for length in (512, 2048)]
            for new, before, batch in steps:
                kind = f"decode batch {batch} at 512" if new == 1 else f"prefill {new}"
                own = new * batch / model_seconds(model, new, before, batch, budget_seconds)
                other = new * batch / peer_seconds(peer, new, before, batch, budget_seconds)
                print(f"{name + ' ' + kind:52}{own:10.0f}{other:14.0f}{own / other:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    ours = operators("cpu", args.cache_dir)
    budget_seconds = 0.02 if args.quick else 0.3
    print_operators(ours, budget_seconds)
    print_models(ours, budget_seconds)


if __name__ == "__main__":
    main()
