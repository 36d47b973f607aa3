# pyright: basic
# transformers has no usable types.
"""Whole models: tokens per CPU second of our engine, of the model alone, of transformers and of vLLM."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from benchmarks.kernels.clock import Roofline, best_seconds, cpu_seconds
from benchmarks.kernels.peer import Peer, PeerFailed
from benchmarks.kernels.shapes import PAGE_TOKENS, step_inputs
from tidemill import LLM, SamplingParams
from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.layout import Layout, layout_of
from tidemill.workers.models.architectures.registry import LoadedModel, load
from tidemill.workers.models.inputs import caches_of

Row = dict[str, Any]
Prompts = list[list[int]]
Answer = Callable[[Prompts, int], float]
"""Returns the CPU seconds for a number of greedy tokens after each of these prompts."""

PEERS = ("transformers", "vllm")
VOCABULARY = 800
SIDE_SECONDS_MAX = 30.0  # of one side at one step: a slow one has fewer turns
SETTINGS = {"memory": "1GiB", "threads": 1, "max_num_seqs": 32}


@dataclass(frozen=True, slots=True)
class Step:
    """Decode: `batch` sequences, each `new` tokens after a prompt. Prefill: a prompt and its first token."""

    prompt: int
    batch: int
    new: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}" if self.new else f"prefill {self.prompt}"

    @property
    def tokens(self) -> int:
        return self.batch * (self.new or self.prompt)


STEPS = (Step(16, 1, 32), Step(16, 8, 32), Step(16, 32, 16), Step(512, 1, 0), Step(2048, 1, 0))


@dataclass(frozen=True, slots=True)
class Measure:
    """The setup of a measurement for all models. `roofline` is printed beside each."""

    operators: Operators
    cache_dir: Path
    vllm: Peer | None
    roofline: Roofline
    turns: int


def models(folders: dict[str, Path], by: Measure) -> list[Row]:
    """Sides answer the same kind of prompts, turn by turn. Decode is what a long answer takes more than its
    first token; the best of all turns counts."""
    rows: list[Row] = []
    for name, folder in folders.items():
        model = load(folder, by.operators, lambda _done, _total: None)
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
        with closing(LLM(folder, **SETTINGS, cache_folder=by.cache_dir)) as engine:
            sides = sides_of(folder, engine, by.vllm)
            for step in STEPS:
                num_bytes, flops = least(
                    model, layout_of(model.layers, PAGE_TOKENS), step, weight_bytes, hidden
                )
                by.roofline.look(num_bytes)
                found = turns(step, sides, by.turns)
                found["model alone"] = min(alone(model, step) for _ in range(by.turns))
                row: Row = {"model": name, "step": step.name, "prompt": step.prompt, "batch": step.batch}
                for side, took in found.items():
                    row[side] = took if isinstance(took, str) else step.tokens / took
                row |= {"num_bytes": num_bytes, "flops": flops, "tokens": step.tokens}
                rows.append(row | {"times": step.new or 1})
    for row in rows:
        least_seconds = row.pop("times") * by.roofline.seconds(row["num_bytes"], row["flops"])
        row["roofline"] = row.pop("tokens") / least_seconds
        row["share"] = row["ours"] / row["roofline"]
    show(rows)
    return rows


def sides_of(folder: Path, engine: LLM, vllm: Peer | None) -> dict[str, Answer]:
    """Return the sides that answer."""
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sides: dict[str, Answer] = {
        "ours": lambda prompts, new: ours(engine, prompts, new),
        "transformers": lambda prompts, new: generated(peer, prompts, new),
    }
    if vllm is not None:
        sides["vllm"] = lambda prompts, new: vllm.seconds(model=str(folder), prompts=prompts, new_tokens=new)
    return sides


def turns(step: Step, sides: dict[str, Answer], count: int) -> dict[str, float | str]:
    """Return the CPU seconds of each side, or its error."""
    rng, found = Random(0), dict[str, float | str]()
    first: dict[str, list[float]] = {side: [] for side in sides}
    whole: dict[str, list[float]] = {side: [] for side in sides}

    def prompts() -> Prompts:
        return [[rng.randrange(3, VOCABULARY) for _ in range(step.prompt)] for _ in range(step.batch)]

    for side in list(sides) * count:
        if side in found or sum(first[side] + whole[side]) > SIDE_SECONDS_MAX:
            continue
        try:
            first[side].append(sides[side](prompts(), 1))
            if step.new:
                whole[side].append(sides[side](prompts(), 1 + step.new))
        except PeerFailed as error:
            found[side] = str(error)
    for side in sides.keys() - found.keys():
        found[side] = min(whole[side]) - min(first[side]) if step.new else min(first[side])
    return found


def ours(engine: LLM, prompts: Prompts, new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return cpu_seconds(lambda: engine.generate(prompts, params, progress=False))


def generated(model: Any, prompts: Prompts, new_tokens: int) -> float:  # noqa: ANN401 - see above
    tokens = torch.tensor(prompts)
    options = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.inference_mode():
        return cpu_seconds(lambda: model.generate(tokens, attention_mask=torch.ones_like(tokens), **options))


def alone(model: LoadedModel, step: Step) -> float:
    """CPU seconds of the model without an engine: logits of the last token of each row."""
    layout = layout_of(model.layers, PAGE_TOKENS)
    new, before = (1, step.prompt + step.new // 2) if step.new else (step.prompt, 0)
    inputs = step_inputs([new] * step.batch, [before] * step.batch)
    states = -(-step.batch // layout.states_per_extent)
    extents = states + -(-inputs.pages_BN.numel() // layout.pages_per_extent)
    caches = caches_of(layout, torch.zeros(extents * layout.extent_bytes, dtype=torch.uint8))
    inputs.pages_BN.add_(states * layout.pages_per_extent)
    last_B = inputs.cu_B1[1:].long() - 1
    seconds = best_seconds(lambda: model.model.logits(model.model.forward(inputs, caches)[last_B]), 0.3)
    return seconds * (step.new or 1)


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


def show(rows: list[Row]) -> None:
    """`x` columns: our tokens per CPU second divided by those of that side."""
    columns = "".join(f"{side:>14}" for side in ("ours", "model alone", *PEERS, "roofline"))
    print(
        f"{'tokens per CPU second':32}{columns}{'share':>7}" + "".join(f"{'x ' + side:>16}" for side in PEERS)
    )
    for row in rows:
        figures = [row.get(side) for side in ("ours", "model alone", *PEERS, "roofline")]
        ratios = [row["ours"] / row[side] if isinstance(row.get(side), float) else None for side in PEERS]
        print(
            f"{row['model'] + ' ' + row['step']:32}"
            + "".join(f"{figure:14,.0f}" if isinstance(figure, float) else f"{'-':>14}" for figure in figures)
            + f"{row['share']:7.0%}"
            + "".join(f"{'-':>16}" if ratio is None else f"{ratio:16.1f}" for ratio in ratios)
        )
    for refused in {row["vllm"] for row in rows if isinstance(row.get("vllm"), str)}:
        print(f"vLLM: {refused}", flush=True)
