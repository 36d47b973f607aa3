"""Predictions of `tidemill plan` beside what `tidemill bench` measures on the planned server.

    python -m benchmarks.serving.plans [--repeats 3] [--models keeper hybrid]

Each repeat measures step times, plans, serves the file that was written, and sends the load of the plan:
all within a minute or two, because other work on the machine changes its speed. `hybrid` is a random
Qwen3-Next of 76M parameters.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.e2e.server import Server

from tidemill.workers.sources.names import bundled

HYBRID = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 27,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Load(NamedTuple):
    """The arrivals and lengths of requests, and the targets of the plan in milliseconds."""

    rate: float
    prompts: int
    input_len: int
    output_len: int
    ttft_ms: int
    itl_ms: int


LOADS = {
    "keeper": [Load(8, 160, 256, 64, 100, 10), Load(16, 240, 512, 32, 200, 20)],
    "hybrid": [Load(0.8, 24, 256, 32, 2000, 100), Load(1.5, 36, 128, 32, 2000, 100)],
}


def folder_of(name: str, scratch: Path) -> str:
    """Return the name or the folder of a model."""
    if name == "keeper":
        return name
    folder = scratch / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HYBRID))
    for file in TOKENIZER:
        shutil.copy(bundled()["keeper"] / file, folder / file)
    return str(folder)


def tidemill(*arguments: object) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    command = [sys.executable, "-m", "tidemill", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout[done.stdout.index("{") :])


def compare(model: str, load: Load, scratch: Path, seed: int) -> dict[str, Any]:
    """Return the predicted and the measured times in milliseconds of one plan."""
    output = scratch / "cluster.yaml"
    output.unlink(missing_ok=True)
    lengths = ["--num-prompts", load.prompts, "--request-rate", load.rate, "--seed", seed]
    plan = tidemill(
        "plan", model, *lengths, "--input-len", load.input_len, "--output-len", load.output_len,
        "--ttft-target", f"{load.ttft_ms}ms", "--itl-target", f"{load.itl_ms}ms", "--output", output,
        *([] if model == "keeper" else ["--load-format", "dummy"]),
    )  # fmt: skip
    chosen = plan["cards"][0]["chosen"]
    server = Server(["--config", str(output), "--port", "0", "--log-level", "warning"], scratch / "log")
    try:
        bench = tidemill(
            "bench", "--base-url", server.url, *lengths, "--random-input-len", load.input_len,
            "--random-output-len", load.output_len, "--ignore-eos", "--temperature", 0,
        )  # fmt: skip
    finally:
        server.kill_everything()
    found: dict[str, Any] = {"arrangement": {role: chosen[role] for role in ("mixed", "prefill", "decode")}}
    for metric in ("ttft", "itl"):
        for share, name in (("p50", f"median_{metric}_ms"), ("mean", f"mean_{metric}_ms")):
            predicted, measured = chosen[f"{metric}_ms"][share], bench[name]
            found[f"{share} {metric}"] = (
                f"{predicted:8.2f} ms predicted, {measured:8.2f} measured, {predicted / measured - 1:+.0%}"
            )
    return {**found, "failed": bench["failed"], "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.plans")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(LOADS), choices=list(LOADS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in options.models:
            model = folder_of(name, scratch)
            for load in LOADS[name]:
                for repeat in range(options.repeats):
                    found = compare(model, load, scratch, repeat)
                    print(f"{name} {load}", flush=True)
                    for metric, value in found.items():
                        print(f"  {metric:12} {value}", flush=True)


if __name__ == "__main__":
    main()
