"""A whole server with Ray and HTTP on a device: streams through a killed worker, and the speed of a model.

    python -m benchmarks.gpu.served kill --folder FOLDER [--device cpu]
    python -m benchmarks.gpu.served ranks --folder FOLDER [--device cpu]
    python -m benchmarks.gpu.served speed --folder FOLDER [--device cpu]

`kill` ends a worker of keeper with SIGKILL amid 16 streams and compares all answers. `ranks` does it where
each worker has two ranks: all four on one GPU, over gloo. `speed` serves a random model of Qwen3-Next's
layers (`--load-format dummy`), and samples the threads of its worker with py-spy. All add rows to
FOLDER/served.json.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
from tests.support.e2e.faults import Fault, strike
from tests.support.e2e.faults import Run as FaultRun
from tests.support.e2e.server import Server

from benchmarks.faults.scene import Load, names_of, serving, until_all_are_back
from benchmarks.gpu.engine import LAYER, TINY_LAYER
from benchmarks.gpu.minutes import Verdict
from benchmarks.serving.serve import GREEDY, measure
from tidemill.cluster.bench.report import figures_of
from tidemill.workers.sources.names import bundled

LAYERS = 8
STREAMS = 16
TOP_P = {"temperature": 0.8, "top_p": 0.95}
SETTLE_S = 1.0
SPY_S = 15
NONE: Mapping[str, object] = {}
SCORED_S_MAX = 60.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def killed(folder: Path, device: str, ranks: int = 1) -> list[Verdict]:
    """Kill a worker amid streams, and compare each stream with the same one in a calm."""
    options = ["--mixed", "2", "--device", device, "--kv-cache-dtype", "float32"]
    options += ["--backing", "fixed", "--num-gpus", str(0.5 / ranks)] if device != "cpu" else []
    if ranks > 1:
        options += ["--tensor-parallel-size", str(ranks), "--tensor-parallel-reduce", "fast"]
        options += ["--tensor-parallel-backend", "gloo", "--enforce-eager"]
    with serving(options, folder / f"kill-server-{ranks}.log") as server:
        load = Load(server, STREAMS, max_tokens=120)
        name = min(names_of(server))

        async def work() -> None:
            await asyncio.sleep(SETTLE_S)
            await strike(server, Fault(name), FaultRun([]))
            await until_all_are_back(server, names_of(server), SETTLE_S)

        run, _ = load.under("killed", work)
        found = load.verdict(run.calls)
    wrong = found["failed"] + found["changed"]
    figure = f"{found['streams']} streams, {found['failed']} failed, {found['changed']} changed"
    return [
        Verdict(
            f"kill -9 of a worker, {ranks} ranks each", figure, "0 wrong", "MISSED" if wrong else "reached"
        )
    ]


def random_model(folder: Path, layer: Mapping[str, object]) -> Path:
    """Return a folder of a configuration without weights, with keeper's tokenizer."""
    target = folder / "random-model"
    target.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "torch_dtype": "bfloat16",
    }
    (target / "config.json").write_text(json.dumps({**config, **layer, "num_hidden_layers": LAYERS}))
    for name in TOKENIZER:
        if (bundled()["keeper"] / name).exists():
            shutil.copy(bundled()["keeper"] / name, target / name)
    return target


def spied(pid: int, folder: Path) -> Verdict:
    """Sample the threads of a worker: the share of samples in which each holds the interpreter's lock."""
    program = shutil.which("py-spy")
    if program is None:
        return Verdict("threads of the worker", "", "", "needs py-spy")
    output = folder / "threads.txt"
    command = [program, "record", "--gil", "--threads", "--nonblocking", "--format", "raw", "--duration"]
    done = subprocess.run(  # noqa: S603
        [*command, str(SPY_S), "--output", str(output), "--pid", str(pid)], capture_output=True, text=True,
        check=False, timeout=4 * SPY_S,
    )  # fmt: skip
    if done.returncode:
        return Verdict("threads of the worker", done.stderr.strip()[-60:], "", "FAILED")
    counts: dict[str, int] = {}
    for line in output.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread = stack.split(";")[0]
        counts[thread] = counts.get(thread, 0) + int(count)
    most = sorted(counts.items(), key=lambda pair: -pair[1])[:3]
    figure = ", ".join(f"{thread[:24]} {count}" for thread, count in most)
    return Verdict("samples with the lock, by thread", figure, "", "figure")


def scored(url: str, tokens: int) -> list[Verdict]:
    """Time a prompt without logprobs, and another one with them."""
    with httpx.Client(base_url=url, timeout=SCORED_S_MAX) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        took_s: list[float] = []
        for salt, more in enumerate((NONE, {"prompt_logprobs": 0}) * 2):
            prompt = [(7919 * salt + 31 * at) % 880 + 3 for at in range(tokens - 2)]
            start_s = time.perf_counter()
            asked = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
            client.post("/v1/completions", json=asked).raise_for_status()
            took_s.append(time.perf_counter() - start_s)
    text = f"{took_s[2]:.2f} s, with logprobs of the prompt {took_s[3]:.2f} s"
    return [Verdict(f"a prompt of {tokens} tokens", text, "", "figure")]


def fast(folder: Path, device: str) -> list[Verdict]:
    is_tiny = device == "cpu"
    model = random_model(folder, TINY_LAYER | {"vocab_size": 2000} if is_tiny else LAYER)
    options = [str(model), "--port", "0", "--mixed", "1", "--device", device, "--load-format", "dummy"]
    options += ["--memory", "128MiB"] if is_tiny else ["--memory", "24GiB", "--backing", "fixed"]
    options += ["--max-num-seqs", "128", "--max-model-len", "4096"]
    found: list[Verdict] = []
    server = Server(options, folder / "speed-server.log")
    try:
        most = 4 if is_tiny else 128
        for concurrency, name, sampling in [
            *((concurrency, "greedy", GREEDY) for concurrency in ((1, most) if is_tiny else (1, 32, most))),
            (most, "top-p", TOP_P),
        ]:
            run = asyncio.run(measure(server.url, "unique", concurrency, seed=concurrency, sampling=sampling))
            figures = figures_of(run)
            text = f"TTFT {figures['median_ttft_ms']:.1f} ms, ITL {figures['median_itl_ms']:.2f} ms, "
            text += f"p99 {figures['p99_itl_ms']:.1f} ms, "
            text += f"longest {1e3 * max(gap_s for answer in run.answered for gap_s in answer.gaps_s):.0f} ms"
            found.append(Verdict(f"server, {concurrency} at a time, {name}", text, "", "figure"))
            keep(folder, "speed", found)  # also if what follows is cut
        found += scored(server.url, 2000 if is_tiny else 4000)
        (row,) = server.workers()

        async def under_load() -> Verdict:
            load = asyncio.create_task(measure(server.url, "unique", most, seed=7))
            await asyncio.sleep(SETTLE_S)
            verdict = await asyncio.to_thread(spied, row["info"]["pid"], folder)
            await load
            return verdict

        found.append(asyncio.run(under_load()))
    finally:
        server.kill_everything()
    return found


PARTS: Mapping[str, Callable[[Path, str], list[Verdict]]] = {
    "kill": killed,
    "ranks": partial(killed, ranks=2),
    "speed": fast,
}


def keep(folder: Path, part: str, rows: Sequence[Verdict]) -> None:
    path = folder / "served.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | {part: [asdict(row) for row in rows]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rows = PARTS[args.part](args.folder, args.device)
    keep(args.folder, args.part, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
