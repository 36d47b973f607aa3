"""SGLang's own client with its shared-prefix workload, against the servers beside ours or a given URL.

python -m benchmarks.peers.sglang_client --sglang ENVIRONMENT --folder FOLDER [--servers vllm tidemill]
python -m benchmarks.peers.sglang_client --sglang ENVIRONMENT --folder FOLDER --url URL

ENVIRONMENT is a virtual environment with SGLang 0.5.23 by `pip install --no-deps sglang`, torch, the
transformers that SGLang pins, and the modules that its `bench_serving --help` misses. It needs
no kernels. FOLDER is that of `benchmarks.peers`, with the hybrid. Each server gets the same prompts twice.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.peers.models import make_model
from benchmarks.peers.servers import PORTS, command_of, make_server, started

WORKLOAD = {
    "gsp-num-groups": 4,
    "gsp-prompts-per-group": 4,
    "gsp-system-prompt-len": 2400,
    "gsp-question-len": 128,
    "gsp-output-len": 16,
    "max-concurrency": 4,
}
FIGURES = ("completed", "total_input_tokens", "duration", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms")


def main() -> None:
    options = _options()
    print("| server | prompts | " + " | ".join(FIGURES) + " |")
    print("|---" * (len(FIGURES) + 2) + "|")
    for line in _rows(options):
        print(line, flush=True)


def _rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield a line of Markdown for each run of the client."""
    model = make_model(options.folder, "hybrid")
    if options.url:
        yield from _asked(options, options.url, options.url, model)
        return
    for server in options.servers:
        url = f"http://127.0.0.1:{PORTS[server]}"
        home = make_server(server, options.folder)
        arrangement = f"--mixed 1 --threads {options.cores}"
        command, settings = command_of(server, home, model, options.cores, arrangement)
        with started(command, settings, url, options.folder / f"{server}.log"):
            yield from _asked(options, server, url, model)


def _asked(options: argparse.Namespace, server: str, url: str, model: Path) -> Iterator[str]:
    served = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    for prompts in ("new", "the same again"):
        found = run_client(options.sglang / "bin/python", url, served, model)
        yield f"| {server} | {prompts} | " + " | ".join(f"{found[name]:.5g}" for name in FIGURES) + " |"


def run_client(python: Path, url: str, served: str, tokenizer: Path) -> dict[str, Any]:
    """Run SGLang's client and return the figures of its report. Raises CalledProcessError."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [str(python), "-m", "sglang.bench_serving", "--backend", "vllm", "--base-url", url]
        command += ["--model", served, "--tokenizer", str(tokenizer), "--output-file", str(report)]
        command += ["--dataset-name", "generated-shared-prefix"]
        for option, value in WORKLOAD.items():
            command += [f"--{option}", str(value)]
        environ = {"HF_HUB_OFFLINE": "1", "HOME": folder}
        subprocess.run(command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)  # noqa: S603
        return json.loads(report.read_text().splitlines()[0])


def _options() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--sglang", type=Path, required=True, metavar="ENVIRONMENT")
    command.add_argument("--folder", type=Path, required=True, help="that of benchmarks.peers")
    command.add_argument("--url", help="ask this server, which has the hybrid, instead of --servers")
    command.add_argument("--servers", nargs="*", default=["vllm", "tidemill"])
    command.add_argument("--cores", type=int, default=1)
    return command.parse_args()


if __name__ == "__main__":
    main()
