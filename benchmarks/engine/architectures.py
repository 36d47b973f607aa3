# pyright: basic
# transformers has no usable types.
"""Print the bytes of a token, a window and a state by architecture, and tokens per CPU second against
transformers.

    python -m benchmarks.engine.architectures [table] [speed]

Writes results/architectures.json. The table comes from the specs of layers.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.parity.architectures import random_model

from benchmarks.engine.released import bytes_by_architecture
from benchmarks.kernels.__main__ import machine
from benchmarks.kernels.models import Step, sides_of, turns
from tidemill import LLM
from tidemill.workers.sources.names import bundled

RESULT = Path(__file__).parents[1] / "results" / "architectures.json"
STEPS = (Step(16, 1, 32), Step(16, 8, 32), Step(512, 1, 0))
SETTINGS = {"memory": "512MiB", "threads": 1, "max_num_seqs": 8}
SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}
SHARED = {"shared_expert_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama/tied": {},
    "qwen3/tied": {},
    "qwen3_moe/all": EXPERTS,
    "qwen3_next/dense-tied": DELTA,
    "qwen3_5/text": DELTA,
    "qwen3_5_moe/text": DELTA | EXPERTS | SHARED,
    "gpt_oss/alternating": {
        "intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "granitemoehybrid/moe": {
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "layer_types": [*["mamba"] * 3, "attention"] * 2,
    },
    "deepseek_v3/groups": {
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "kv_lora_rank": 128,
        "q_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 2048,
    },
}
"""About the same size, each in the way of its architecture; beside these, the names of `random_model`."""

Row = dict[str, Any]


def table() -> list[Row]:
    rows = bytes_by_architecture()
    print(f"{'':22}{'layers':28}{'a token':>12}{'a window':>14}{'a state':>14}{'32,768 tokens':>18}   bytes")
    for row in rows:
        model, layers, *sizes = row.values()
        token, window, state, whole = (f"{size:,}" if size else "-" for size in sizes)
        print(f"{model:22}{layers:28}{token:>12}{window:>14}{state:>14}{whole:>18}", flush=True)
    return rows


def speed(cache_dir: Path, count: int) -> list[Row]:
    """Sides in turn; see benchmarks/kernels/models.py. Weights are bfloat16, with which ours computes;
    transformers computes in float32, which is faster for it here."""
    rows: list[Row] = []
    for name, changes in MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model = random_model(name, **(SIZES | changes)).bfloat16()
            model.save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(bundled()["keeper"] / file, folder / file)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            with closing(LLM(folder, **SETTINGS, cache_folder=cache_dir)) as engine:
                sides = sides_of(folder, engine, None)
                for step in STEPS:
                    found = {side: step.tokens / float(s) for side, s in turns(step, sides, count).items()}
                    row: Row = {"architecture": name.partition("/")[0], "parameters": parameters}
                    rows.append(row | {"step": step.name} | found)
                    ratio = found["ours"] / found["transformers"]
                    print(
                        f"{row['architecture']:18}{parameters / 1e6:6.1f} M  {step.name:18}"
                        f"{found['ours']:10,.0f}{found['transformers']:14,.0f}{ratio:8.1f}",
                        flush=True,
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=["table", "speed"], default=["table", "speed"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "table" in given.parts:
        result["table"] = table()
    if "speed" in given.parts:
        result |= {"command": " ".join(["python -m benchmarks.engine.architectures", *sys.argv[1:]])}
        result |= {"machine": machine(), "speed": speed(given.cache_dir, given.turns)}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
