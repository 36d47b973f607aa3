"""The time of each operator in a step of a model, and the step's share of its limit, on one core or more.

    python -m benchmarks.engine.roofline FOLDER [--threads N]

Steps decode 1, 8, 32 and 128 rows after 128 tokens, and run 512 tokens of a prompt after 0, 2,048 and 7,488.
They are recorded, as a worker runs them (decision 32); beside that is the plain step, whose operators have
the times. Pages have the type of products, as those of a worker. All is CPU time of the thread, or wall
time of several, the best of several steps in turn. A step's limit is the larger of two times: its bytes
(weights, of experts the expected share; states, keys and values) by the bandwidth of a copy or a sum,
whichever is faster, and its operations by the peak of torch's product of matrices in the model's type.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.kernels.clock import MATRIX, best_seconds
from benchmarks.kernels.shapes import PAGE_TOKENS, step_inputs
from tidemill.kernels.dispatch import NAMES, Operators, operators
from tidemill.kernels.shared.huge_pages import HugePages
from tidemill.kvstore.layout import Layout, layout_of
from tidemill.workers.execution.recorded_steps import RecordedSteps
from tidemill.workers.models.architectures.registry import LoadedModel, Model, compute_dtype_of, load
from tidemill.workers.models.inputs import Caches, Inputs, caches_of

BEFORE, TURNS, BUDGET_S = 128, 7, 0.15


@dataclass(frozen=True, slots=True)
class Step:
    """Decode: `batch` sequences, each `new` tokens after a prompt. Prefill: a prompt and its first token."""

    prompt: int
    batch: int
    new: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}" if self.new else f"prefill {self.prompt}"


STEPS = (
    *((Step(BEFORE, rows, 1), 0) for rows in (1, 8, 32, 128)),
    *((Step(512, 1, 0), depth) for depth in (0, 2048, 7488)),
)
"""Steps, and the tokens before those of a prompt."""


def now_s() -> float:
    """Return CPU time where one thread computes, which other work changes less, or else wall time."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(plain: Operators, spent_s: dict[str, float]) -> Operators:
    """Return the operators with clocks. `pack`, of loading, has none."""

    def clocked(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            start_s = now_s()
            try:
                return call(*arguments, **named)
            finally:
                spent_s[name] += now_s() - start_s

        return run

    timed: dict[str, Any] = {name: clocked(name, getattr(plain, name)) for name in NAMES if name != "pack"}
    return replace(plain, **timed)


def matmul_flops_s(dtype: torch.dtype) -> float:
    """Return the peak of the threads, as torch reaches it."""
    a, b = torch.randn(2, MATRIX, MATRIX).to(dtype)
    return 2.0 * MATRIX**3 / best_seconds(lambda: a @ b, BUDGET_S, now_s)


def bytes_s(num_bytes: int) -> float:
    """Return the bytes that the threads move in a second, of memory in huge pages as weights have it."""
    memory = HugePages()
    source, target = (memory.empty(num_bytes // 8, dtype=torch.float32).fill_(1) for _ in range(2))
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), BUDGET_S, now_s)
    return max(copied, source.nbytes / best_seconds(source.sum, BUDGET_S, now_s))


def weight_bytes(folder: Path, tokens: int) -> int:
    """Return the bytes of weights that a step reads, if each token draws its experts evenly."""
    config = json.loads((folder / "config.json").read_text())
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    read = 1 - (1 - config.get("num_experts_per_tok", 1) / experts) ** tokens
    total = 0.0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                total += file.get_tensor(name).nbytes * (read if ".experts." in name else 1.0)
    return round(total)


def least(
    model: LoadedModel, layout: Layout, step: Step, weight_bytes: int, hidden: int, depth: int = 0
) -> tuple[float, float]:
    """Bytes and FLOPs of a step: weights are read once, states read and written, keys and values read. Their
    cost has logits of every token; of a prompt only the last one needs them. `depth` tokens precede it."""
    start = step.prompt + step.new // 2 if step.new else depth
    end = start + (1 if step.new else step.prompt)
    kv_bytes = layout.page_bytes / PAGE_TOKENS * end
    num_bytes = weight_bytes + step.batch * (2 * layout.state_bytes + kv_bytes)
    unneeded = (end - start - 1) * 2 * model.vocab_size * hidden
    return num_bytes, step.batch * (model.cost.flops(start, end) - unneeded)


def inputs_of(step: Step, layout: Layout, depth: int = 0) -> tuple[Inputs, Caches]:
    """Return the rows of a step and memory for them."""
    new, before = (1, step.prompt) if step.new else (step.prompt, depth)
    inputs = step_inputs([new] * step.batch, [before] * step.batch)
    states = -(-step.batch // layout.states_per_extent) if layout.states_per_extent else 0
    extents = states + -(-inputs.pages_BN.numel() // layout.pages_per_extent)
    caches = caches_of(layout, torch.zeros(extents * layout.extent_bytes, dtype=torch.uint8))
    inputs.pages_BN.add_(states * layout.pages_per_extent)
    return inputs, caches


def step_s(model: Model, inputs: Inputs, forward: Callable[[Inputs], torch.Tensor | None]) -> float:
    """Return the time of a step, with the logits of the last token of each row."""
    start_s = now_s()
    hidden_TH = forward(inputs)
    assert hidden_TH is not None, "this model is not recorded"
    model.logits(hidden_TH[inputs.cu_B1[1:].long() - 1])
    return now_s() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.roofline", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("folder", type=Path, help="a model folder")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spent_s: dict[str, float] = defaultdict(float)
    dtype = compute_dtype_of(options.folder)
    plain = operators("cpu", options.cache_dir, dtype)
    model = load(options.folder, timed(plain, spent_s), lambda _done, _total: None, compute_dtype=dtype)
    layout = layout_of(model.layers, PAGE_TOKENS, dtype)
    hidden = model.model.forward(*inputs_of(Step(1, 1, 1), layout)).shape[1]
    peak = matmul_flops_s(getattr(torch, dtype))
    for step, depth in STEPS:
        weights = weight_bytes(options.folder, step.batch * (1 if step.new else step.prompt))
        num_bytes, flops = least(model, layout, step, weights, hidden, depth)
        limit_s = max(num_bytes / bytes_s(int(num_bytes)), flops / peak)
        inputs, caches = inputs_of(step, layout, depth)
        with torch.inference_mode():
            recorded = RecordedSteps(
                model.model, caches, len(inputs.tokens_T), step.batch, inputs.pages_BN.shape[1]
            )
            best_s, run_s, parts = float("inf"), float("inf"), dict[str, float]()
            for _ in range(TURNS):
                spent_s.clear()
                took_s = step_s(model.model, inputs, partial(model.model.forward, caches=caches))
                if took_s < best_s:
                    best_s, parts = took_s, dict(spent_s)
                run_s = min(run_s, step_s(model.model, inputs, recorded.forward))
        print(
            f"{step.name} after {step.prompt if step.new else depth}: {run_s * 1e3:.2f} ms, "
            f"plain {best_s * 1e3:.2f} ms, {num_bytes / 1e6:.0f} MB, {flops / 1e9:.1f} GFLOP, "
            f"limit {limit_s * 1e3:.2f} ms, share {limit_s / run_s:.0%}"
        )
        parts["between operators"] = best_s - sum(parts.values())
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
            print(f"  {name:20}{seconds * 1e3:9.2f} ms {seconds / best_s:6.0%}")


if __name__ == "__main__":
    main()
