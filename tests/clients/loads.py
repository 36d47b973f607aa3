"""Load generators that people measure servers with: how each is called, and what it has found."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

REQUESTS = 20
STREAMS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 64, 16
GIVE_UP_S = 900
OFFLINE = {"HF_HUB_OFFLINE": "1"}

VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
options = argparse.ArgumentParser()
add_cli_args(options)
main(options.parse_args())
"""
"""`vllm bench serve`, a command that the wheel for CPUs cannot start: it looks for a package called vllm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and its model's tokenizer."""

    url: str
    model: str
    tokenizer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures that a client reports of its run. Times are medians."""

    completed: int
    failed: int
    answer_tokens: float  # of all
    ttft_ms: float
    itl_ms: float

    def problems(self) -> list[str]:
        """Return what a working server would not show."""
        expected = REQUESTS * ANSWER_TOKENS
        checks = {
            f"{self.failed} requests failed": self.failed == 0,
            f"{self.completed} of {REQUESTS} requests completed": self.completed == REQUESTS,
            f"{self.answer_tokens} tokens came instead of {expected}": self.answer_tokens == expected,
            f"the first token came after {self.ttft_ms} ms, others after {self.itl_ms}": self.ttft_ms > 0
            and self.itl_ms > 0,
        }
        return [text for text, holds in checks.items() if not holds]


class Result(Protocol):
    """The findings of a client, and what of them is wrong."""

    def problems(self) -> list[str]: ...


def report(name: str, found: Result) -> bool:
    """Print what a client has found. Return whether any of it is wrong."""
    problems = found.problems()
    sys.stdout.write(f"{name}: {found}\n")
    sys.stdout.writelines(f"  wrong: {problem}\n" for problem in problems)
    sys.stdout.flush()
    return bool(problems)


def run(command: Sequence[str | Path], folder: Path, **more: str) -> None:
    """Run the command in `folder`, without our environment and with `more`. Raises CalledProcessError with
    the output."""
    ours = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryFile("w+") as output:
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env={**environ, "PWD": str(folder), **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=GIVE_UP_S,
        )
        output.seek(0)
        if ended.returncode:
            raise subprocess.CalledProcessError(ended.returncode, ended.args, output.read()[-4000:])


def words_of(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def vllm(python: Path, target: Target, folder: Path) -> Found:
    """`vllm bench serve`."""
    options = {
        "--backend": "openai-chat",
        "--endpoint": "/v1/chat/completions",
        "--base-url": target.url,
        "--model": target.model,
        "--tokenizer": target.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": PROMPT_TOKENS,
        "--random-output-len": ANSWER_TOKENS,
        "--num-prompts": REQUESTS,
        "--max-concurrency": STREAMS,
        "--result-dir": folder,
        "--result-filename": "vllm.json",
    }
    run(
        [python, "-c", VLLM_BENCH_SERVE, *words_of(options), "--ignore-eos", "--save-result"],
        folder,
        **OFFLINE,
    )
    result = _read(folder / "vllm.json")
    return Found(
        completed=result["completed"],
        failed=result["failed"],
        answer_tokens=result["total_output_tokens"],
        ttft_ms=result["median_ttft_ms"],
        itl_ms=result["median_itl_ms"],
    )


def guidellm(python: Path, target: Target, folder: Path) -> Found:
    path = folder / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={target.url},model={target.model}",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={target.tokenizer}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
        "--output": f"kind=json,path={path}",
    }
    run(
        [python.with_name("guidellm"), "run", *words_of(options), "--disable-progress"],
        folder,
        **OFFLINE,
        GUIDELLM__MAX_WORKER_PROCESSES="1",  # several do not start in time on a busy machine
    )
    metrics = _read(path)["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    return Found(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        answer_tokens=metrics["output_token_count"]["successful"]["total_sum"],
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        itl_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
    )


def aiperf(python: Path, target: Target, folder: Path) -> Found:
    """It finds a tokenizer in a folder only when it may ask the hub, which it then does not."""
    options = {
        "-m": target.model,
        "--url": target.url,
        "--endpoint-type": "chat",
        "--tokenizer": target.tokenizer,
        "--concurrency": STREAMS,
        "--request-count": REQUESTS,
        "--synthetic-input-tokens-mean": PROMPT_TOKENS,
        "--output-tokens-mean": ANSWER_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": folder / "aiperf",
        "--ui": "none",
    }
    run([python.with_name("aiperf"), "profile", *words_of(options), "--streaming"], folder)
    (path,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    result = _read(path)
    return Found(
        completed=int(result["completed_request_count"]["avg"]),
        failed=sum(error["count"] for error in result["error_summary"]),
        answer_tokens=result["total_usage_completion_tokens"]["avg"],
        ttft_ms=result["time_to_first_token"]["p50"],
        itl_ms=result["inter_token_latency"]["p50"],
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


LOADS: dict[str, Callable[[Path, Target, Path], Found]] = {
    "vllm": vllm,
    "guidellm": guidellm,
    "aiperf": aiperf,
}
"""Each gets the Python of its environment, the target, and a folder of its own."""
