"""Steps of a Qwen3-Next-shaped random model as a worker runs them, against the roofline; page copies.

    python -m benchmarks.gpu.engine --folder FOLDER [--layers 8] [--short] [--tiny]

The layers are those of Qwen3-Next-80B-A3B, as many as the device holds. A step is timed on the host from its
integers to its tokens, with launches and draws and the wait for the device: the median of 10. The roofline is
measured in the same run: a copy of 4 GiB and a bfloat16 matrix product. Steps of `--async-scheduling` are
timed as a chain, each launched while the one before it runs. What a decode step and a prompt spend most on is
listed by torch's profiler. `--tiny` goes through all of it on a
machine without a device, with the operators' definitions: its figures mean nothing.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.support.workers.late import LateStream
from xxhash import xxh3_128_digest

from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.stored import Stored, plain
from tidemill.kvstore.layout import KvDtype, Layout, PageId, StateId, layout_of
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.lease import StateWrite
from tidemill.workers.device import HOST
from tidemill.workers.execution.cuda_graphs import Forward, GraphShape, Replay, graph_shapes
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.overlapped_runner import CudaStream, OverlappedRunner
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Row, Step
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.config import ArchitectureConfig, cost, weight_bytes, weights_of
from tidemill.workers.models.architectures.decoder import Decoder
from tidemill.workers.models.architectures.qwen3_next import parse
from tidemill.workers.models.collectives import ALONE
from tidemill.workers.models.inputs import Caches, caches_of
from tidemill.workers.transfer.staging import Lane

PAGE_TOKENS = 64
ROUNDS = 10
COPY_BYTES = 4 << 30
MATRIX = 8192
SPARE_BYTES = 14 << 30  # for what a prompt of 8192 tokens computes, graphs, and one layer's experts twice
ATTENTION_EVERY = 4
GREEDY = Sampling(temperature=0.0)
TOP_P = Sampling(temperature=0.8, top_p=0.95)
GOALS = {1: 0.6, 32: 0.8, 128: 0.8}  # of the roofline, by rows that decode
PROMPT_GOAL = 0.5  # of the product's FLOPs, for a prompt of 8,192 tokens
LAYERS_MAX = 48

LAYER: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144, "rope_theta": 1e7,
}  # fmt: skip
TINY_LAYER = LAYER | {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements and their devices."""

    layer: dict[str, Any]
    prompts: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    context: int = 4096
    kv_dtype: KvDtype = "bfloat16"
    copied_pages: int = 512
    guessed: tuple[int, ...] = (1, 8)
    drafts: int = 4
    mixed: tuple[int, int] = (32, 64)  # rows that decode, and tokens of a prompt beside them
    step_tokens: int = 1024
    profiled: tuple[int, int] = (32, 2048)  # rows that decode, and tokens of a prompt
    chained: int = 20  # overlapped steps
    wide_tokens: int = 262_144  # of the tables of another graph, of the most rows

    def config(self, layers: int) -> ArchitectureConfig:
        return parse(self.layer | {"num_hidden_layers": layers})


TINY = Plan(
    layer=TINY_LAYER,
    prompts=(70,),
    batches=(1, 3),
    context=70,
    copied_pages=4,
    guessed=(1,),
    drafts=2,
    mixed=(2, 5),
    step_tokens=20,
    profiled=(3, 70),
    chained=4,
    wide_tokens=640,
)
SHORT = Plan(layer=LAYER, prompts=(2048, 8192), batches=(1, 32, 128), copied_pages=64, guessed=(1,))
KERNELS_SHOWN = 15  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roofline:
    """Per second, of plain torch; both sides of a copy count."""

    num_bytes: float
    flops: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.num_bytes, flops / self.flops)


@dataclass(frozen=True, slots=True)
class Bed:
    """A random model with its memory: pages from the first on, states behind those that are used."""

    plan: Plan
    config: ArchitectureConfig
    layout: Layout
    model: Decoder
    caches: Caches
    arena: torch.Tensor
    first_state: int


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the median time from the call to the end of the work that it started."""
    call()
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def roofline(device: torch.device, scale: int) -> Roofline:
    source = torch.zeros(COPY_BYTES // scale, dtype=torch.uint8, device=device)
    target, side = torch.empty_like(source), max(64, MATRIX // scale)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return Roofline(
        2 * source.numel() / seconds(device, lambda: target.copy_(source)),
        2.0 * side**3 / seconds(device, lambda: a @ a),
    )


def memory_for(plan: Plan, config: ArchitectureConfig) -> tuple[Layout, int, int]:
    """The layout, and the extents of pages and of states for the largest batch, and a prompt."""
    layout = layout_of(config.specs, PAGE_TOKENS, plan.kv_dtype)
    rows = max(plan.batches)
    pages = max(rows * -(-(plan.context + 1) // PAGE_TOKENS), -(-max(plan.prompts) // PAGE_TOKENS))
    pages = max(pages, plan.copied_pages)
    return layout, -(-pages // layout.pages_per_extent), -(-rows // layout.states_per_extent)


def layers_for(plan: Plan, free_bytes: int) -> int:
    """Return how many layers fit, in whole groups of three linear ones and one of attention."""
    for layers in range(LAYERS_MAX, 0, -ATTENTION_EVERY):
        config = plan.config(layers)
        layout, pages, states = memory_for(plan, config)
        if (
            weight_bytes(config, "bfloat16") + (pages + states) * layout.extent_bytes + SPARE_BYTES
            <= free_bytes
        ):
            return layers
    raise SystemExit(f"four layers do not fit into {free_bytes:,} bytes")


def random_weights(config: ArchitectureConfig, device: torch.device) -> Callable[[str], Stored]:
    """Return weights by name, drawn on demand, of a size at which activations neither vanish nor grow."""
    weights = weights_of(config)

    def read(name: str) -> Stored:
        shape = weights[name].shape
        if len(shape) == 1:
            middle = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            return plain(torch.full(shape, middle, dtype=torch.bfloat16, device=device))
        scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        return plain(torch.randn(shape, dtype=torch.bfloat16, device=device) * scale)

    return read


def bed_of(plan: Plan, layers: int, ops: Operators, device: torch.device) -> Bed:
    config = plan.config(layers)
    model = Decoder(config, random_weights(config, device), ops, ALONE)
    layout, pages, states = memory_for(plan, config)
    arena = Fixed((pages + states) * layout.extent_bytes, str(device)).memory
    middle = pages * layout.extent_bytes
    arena[:middle].view(torch.bfloat16).normal_()
    arena[middle:].view(torch.float32).normal_().mul_(0.1)
    wait(device)
    return Bed(plan, config, layout, model, caches_of(layout, arena), arena, pages * layout.states_per_extent)


def step_of(
    bed: Bed, rows: int, start: int, tokens: int, *, drafts: int = 0, sampling: Sampling = GREEDY
) -> Step:
    """Each row after `start` tokens of its own; those of one known token draw."""
    width = -(-(start + tokens) // PAGE_TOKENS)
    vocabulary = bed.config.vocab_size
    found: list[Row] = []
    for row in range(rows):
        states = [StateId(bed.first_state + row * (1 + drafts) + at) for at in range(1 + drafts)]
        asked = Request(
            request_id=str(row),
            tokens=(1,) * (start + tokens - drafts),
            max_new_tokens=1,
            sampling=sampling,
        )
        found.append(
            Row(
                sequence_id=str(row),
                tokens=tuple((7919 * row + 31 * at) % vocabulary for at in range(tokens)),
                start=start,
                pages=tuple(map(PageId, range(row * width, (row + 1) * width))),
                read=states[-1] if start else None,
                writes=tuple(
                    StateWrite(start + tokens - drafts + at, state) for at, state in enumerate(states)
                ),
                drafts=drafts,
                sampling_state=SamplingState(asked) if tokens - drafts == 1 else None,
            )
        )
    return tuple(found)


def step_bytes(bed: Bed, rows: int, before: int, tokens: int) -> float:
    """The least that a step moves: weights that some token meets once (of experts, as many as even routing
    chooses), pages and states of its rows."""
    config, layout = bed.config, bed.layout
    layer, num_bytes = bed.plan.layer, 0.0
    met = 1 - (1 - layer["num_experts_per_tok"] / layer["num_experts"]) ** (rows * tokens)
    for name, weight in weights_of(config).items():
        if "embed_tokens" in name or ("lm_head" in name and tokens > 1):
            continue
        num_bytes += 2 * prod(weight.shape) * (met if ".experts." in name else 1.0)
    pages = (before + 2 * tokens) / PAGE_TOKENS * layout.page_bytes  # what is new is written, then read
    return num_bytes + rows * (pages + (2 if before else 1) * layout.state_bytes)


def step_flops(bed: Bed, rows: int, before: int, tokens: int) -> float:
    head = 2.0 * bed.config.vocab_size * bed.config.hidden
    whole = cost(bed.config).flops(before, before + tokens)
    return rows * (whole - (tokens if tokens > 1 else 0) * head)


def recomputed(run: Forward) -> tuple[Replay, torch.Tensor]:
    """Stands for a capture where there is no device."""
    kept = run()

    def replay() -> None:
        kept.copy_(run())

    return replay, kept


@dataclass(frozen=True, slots=True)
class Job:
    """A step to time. Its bytes and FLOPs are those of `rows` of `tokens` after `before`, and of `beside`
    prompt tokens in one more row."""

    name: str
    rows: int
    before: int
    tokens: int
    drafts: int = 0
    sampling: Sampling = GREEDY
    beside: int = 0
    eager: bool = False
    wide: bool = False

    def step(self, bed: Bed) -> Step:
        found = step_of(bed, self.rows, self.before, self.tokens, drafts=self.drafts, sampling=self.sampling)
        if self.beside:  # on the pages and the state of one row more, under its own name
            last = step_of(bed, self.rows + 1, 0, self.beside)[-1]
            found = (*found, last._replace(pages=found[-1].pages[: -(-self.beside // PAGE_TOKENS)]))
        return found

    def least(self, bed: Bed) -> tuple[float, float]:
        sizes = (self.rows, self.before, self.tokens)
        num_bytes, flops = step_bytes(bed, *sizes), step_flops(bed, *sizes)
        return num_bytes, flops + (step_flops(bed, 1, 0, self.beside) if self.beside else 0.0)

    def goal(self, bed: Bed) -> float | None:
        if self.name == "prompt" and self.tokens == MATRIX:
            return PROMPT_GOAL
        decodes = not self.eager and self.tokens == 1 and not self.beside
        return GOALS.get(self.rows) if decodes and self.before == bed.plan.context else None


def jobs_of(plan: Plan) -> list[Job]:
    jobs = [Job("prompt", 1, 0, tokens, eager=True) for tokens in plan.prompts]
    for batch in plan.batches:
        jobs += [
            Job("decode, eager", batch, plan.context, 1, eager=True),
            Job("decode, graphs", batch, plan.context, 1),
            Job("decode, top-p", batch, plan.context, 1, sampling=TOP_P),
        ]
    jobs += [
        Job(f"guesses of {plan.drafts},", rows, plan.context, 1 + plan.drafts, drafts=plan.drafts)
        for rows in plan.guessed
    ]
    rows, tokens = plan.mixed
    jobs.append(Job(f"prompt of {tokens} beside", rows, plan.context, 1, beside=tokens))
    tail, streams = plan.mixed[1] // 4, min(4, max(plan.batches))
    jobs.append(Job(f"tail of {tail} beside", streams, plan.context, 1, beside=tail))
    wide = Job(f"decode, tables of {plan.wide_tokens}", max(plan.batches), plan.context, 1, wide=True)
    return [*jobs, wide]


def timed_steps(
    bed: Bed, most: Roofline, device: torch.device, report: Callable[[dict[str, Any]], None]
) -> None:
    """Prompts eagerly, decode both ways, and what else a graph can hold."""
    plan, capture = bed.plan, None if device.type == "cuda" else recomputed
    eager, graphed, wide = (TorchRunner(bed.model, bed.caches, PAGE_TOKENS, 1, device) for _ in range(3))
    start, rows = time.perf_counter(), max(plan.batches)
    graphed.use_graphs(graph_shapes(rows, plan.step_tokens, plan.drafts), width_of(plan), capture)
    wide.use_graphs([GraphShape(rows, rows)], plan.wide_tokens // PAGE_TOKENS, capture)
    print(f"graphs captured in {time.perf_counter() - start:.1f} s")
    print(f"{'step':36}{'ms':>10}{'tokens/s':>12}{'roofline ms':>13}{'share':>8}")
    for job in jobs_of(plan):
        runner, step = eager if job.eager else wide if job.wide else graphed, job.step(bed)
        took_s = seconds(device, lambda runner=runner, step=step: runner.run_now(step))
        num_bytes, flops = job.least(bed)
        least_s = most.seconds(num_bytes, flops)
        title = f"{job.name} {job.rows} x {job.tokens} after {job.before}"
        tokens_s = (job.rows * job.tokens + job.beside) / took_s
        print(
            f"{title:36}{took_s * 1e3:10.2f}{tokens_s:12.0f}{least_s * 1e3:13.2f}{least_s / took_s:8.0%}",
            flush=True,
        )
        report(
            {
                "name": title, "seconds": took_s, "tokens_per_s": tokens_s, "roofline_seconds": least_s,
                "share": least_s / took_s, "goal": job.goal(bed), "num_bytes": num_bytes, "flops": flops,
            }
        )  # fmt: skip
    for rows in plan.batches:
        took_s = chained_s(bed, rows, device)
        least_s = most.seconds(*Job("", rows, plan.context, 1).least(bed))
        title = f"decode, async {rows} x 1 after {plan.context}"
        print(
            f"{title:36}{took_s * 1e3:10.2f}{rows / took_s:12.0f}{least_s * 1e3:13.2f}{least_s / took_s:8.0%}"
        )
        report(
            {
                "name": title,
                "seconds": took_s,
                "tokens_per_s": rows / took_s,
                "share": least_s / took_s,
                "goal": None,
            }
        )
    decoding, tokens = plan.profiled
    for job, runner in (
        (Job("decode", decoding, plan.context, 1), graphed),
        (Job("prompt", 1, 0, tokens), eager),
    ):
        step, name = job.step(bed), f"{job.name} {job.rows} x {job.tokens}"
        print(*most_time(name, device, partial(runner.run_now, step)), sep="\n", flush=True)
    for runner in (eager, graphed, wide):
        runner.close()


def width_of(plan: Plan) -> int:
    return -(-(plan.context + plan.chained + PAGE_TOKENS) // PAGE_TOKENS)


def chained_s(bed: Bed, rows: int, device: torch.device) -> float:
    """Return the seconds of one of several overlapped steps, each of which reads the tokens of the one before
    it on the device."""
    plan = bed.plan
    tables = PageTables(rows, width_of(plan), windows=False)
    stream = LateStream() if device.type == "cpu" else CudaStream(torch.cuda.Stream(device))
    runner = OverlappedRunner(bed.model, bed.caches, PAGE_TOKENS, 1, stream, None, tables)
    if device.type == "cuda":
        runner.use_graphs([GraphShape(rows, rows)], width_of(plan))
    first = step_of(bed, rows, plan.context, 1)

    def step(at: int) -> Step:
        """Return the step in which each row has one token more."""
        return tuple(
            row._replace(
                start=row.start + at,
                tokens=(PENDING,) if at else row.tokens,
                writes=tuple(StateWrite(write.depth + at, write.state) for write in row.writes),
            )
            for row in first
        )

    async def chain() -> None:
        await asyncio.gather(*(runner.run(step(at)) for at in range(plan.chained)))

    found_s: list[float] = []
    for _ in range(3):
        start_s = time.perf_counter()
        asyncio.run(chain())
        found_s.append((time.perf_counter() - start_s) / plan.chained)
    runner.close()
    return min(found_s)


def most_time(name: str, device: torch.device, call: Callable[[], object]) -> list[str]:
    """Return lines of the kernels (on a CPU: operators) on which a call spends most, by torch's profiler."""
    call()
    wait(device)
    with torch.profiler.profile() as profile:  # of all devices
        call()
        wait(device)
    of_device = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = sorted(profile.key_averages(), key=lambda row: -getattr(row, of_device))
    whole_us = sum(getattr(row, of_device) for row in rows)
    return [
        f"{name}: {whole_us / 1e3:.2f} ms in kernels",
        *(
            f"{getattr(row, of_device) / 1e3:10.3f} ms {getattr(row, of_device) / max(whole_us, 1):4.0%}"
            f" {row.count:5} x {row.key:.60}"
            for row in rows[:KERNELS_SHOWN]
        ),
    ]


def timed_copies(bed: Bed, device: torch.device) -> dict[str, float]:
    """Bytes per second of pages to pinned host memory and back, as transfers copy them, of one copy, and of
    seals on one thread."""
    page_bytes, count = bed.layout.page_bytes, bed.plan.copied_pages
    ring = torch.empty(count * page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    order = torch.randperm(count).tolist()
    near = [ring[at * page_bytes : (at + 1) * page_bytes] for at in range(count)]
    far = [bed.arena[at * page_bytes : (at + 1) * page_bytes] for at in order]
    whole = bed.arena[: ring.numel()]
    body = ring.numpy().data
    sealed_s = seconds(HOST, lambda: xxh3_128_digest(body))
    found: dict[str, float] = {"sealed_bytes_s": ring.numel() / sealed_s}
    print(f"seals of one thread: {ring.numel() / sealed_s / 1e9:.1f} GB/s")
    for way, into, source, blocks in (
        ("out", near, far, lambda: ring.copy_(whole)),
        ("in", far, near, lambda: whole.copy_(ring)),
    ):
        pairs = list(zip(into, source, strict=True))
        with asyncio.Runner() as loop:
            lane = Lane(f"pages-{way}", bed.arena)
            pages_s = seconds(device, lambda lane=lane, pairs=pairs, loop=loop: loop.run(lane.copy(pairs)))
            loop.run(lane.close())
        plain_s = seconds(device, blocks)
        found |= {
            f"pages_{way}_bytes_s": ring.numel() / pages_s,
            f"plain_{way}_bytes_s": ring.numel() / plain_s,
        }
        print(
            f"{count} pages of {page_bytes:,} bytes {way}: {ring.numel() / pages_s / 1e9:.1f} GB/s,"
            f" {plain_s / pages_s:.0%} of one copy"
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="receives gpu_engine.json")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs, without a device")
    parser.add_argument("--short", action="store_true", help="fewer sizes")
    parser.add_argument("--layers", type=int, help="a multiple of 4; as many as fit")
    args = parser.parse_args(arguments)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --tiny runs without one")
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    plan = TINY if args.tiny else SHORT if args.short else Plan(layer=LAYER)
    torch.manual_seed(0)
    most = roofline(device, 4096 if args.tiny else 1)
    if args.tiny:
        layers = args.layers or ATTENTION_EVERY
    else:
        torch.cuda.empty_cache()
        layers = args.layers or layers_for(plan, torch.cuda.mem_get_info(device)[0])
    ops = operators("reference" if args.tiny else "triton", args.folder)
    bed = bed_of(plan, layers, ops, device)
    found: dict[str, Any] = {
        "device": "none" if args.tiny else torch.cuda.get_device_name(device), "torch": torch.__version__,
        "layers": layers, "weight_bytes": weight_bytes(bed.config, "bfloat16"), "plan": asdict(plan),
        "copy_bytes_s": most.num_bytes, "matmul_flops_s": most.flops, "steps": [],
    }  # fmt: skip
    args.folder.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        (args.folder / "gpu_engine.json").write_text(json.dumps(found, indent=1))

    def report(step: dict[str, Any]) -> None:
        found["steps"].append(step)
        save()

    print(
        f"{found['device']}: {layers} layers, {found['weight_bytes'] / 1e9:.1f} GB of weights;"
        f" copy {most.num_bytes / 1e12:.2f} TB/s, bfloat16 {most.flops / 1e12:.0f} TFLOP/s"
    )
    timed_steps(bed, most, device, report)
    found["copies"] = timed_copies(bed, device)
    save()


if __name__ == "__main__":
    main()
