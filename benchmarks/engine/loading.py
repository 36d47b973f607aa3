"""Measure the loading of a model by format: CPU time, and memory beside that of the weights.

python -m benchmarks.engine.loading                  random models of half a billion weights, 1 GB in
bfloat16
python -m benchmarks.engine.loading --weights 50e6      the same, smaller
python -m benchmarks.engine.loading --only bfloat16 fp8
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from tidemill.kernels.dispatch import operators
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.registry import ARCHITECTURES, load
from tidemill.workers.models.collectives import LEADER, Sharing

RESULT = Path(__file__).parents[1] / "results" / "loading.json"
SHARD_BYTES = 256 << 20
RANKS = 4
REPEATS = 3
BLOCK = 128
GROUP = 32
NOISE = 1 << 20

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
GPT_OSS = QWEN3 | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
}

Tensors = dict[str, torch.Tensor]
Store = Callable[[str, torch.Tensor], Tensors]


@dataclass(frozen=True, slots=True)
class Format:
    """`store` makes what a folder holds of one matrix; vectors and the vocabulary stay in `dtype`."""

    base: dict[str, Any]
    dtype: torch.dtype
    quantization: dict[str, Any] | None = None
    store: Store | None = None


def _fp8(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    scale = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), 0.01)
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def _int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = torch.full((len(weight), 1), 0.01, dtype=torch.bfloat16)
    return {name: weight.mul(30).to(torch.int8), f"{name}_scale": scale}


def _int4(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    words = weight.bfloat16().view(torch.int32)[:, : columns // 8].contiguous()  # any bits will do
    return {
        f"{name}_packed": words,
        f"{name}_scale": torch.full((rows, columns // BLOCK), 0.01, dtype=torch.bfloat16),
    }


def _mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    experts, rows, columns = weight.shape
    shape = (experts, columns, rows // GROUP)
    blocks = weight.bfloat16().view(torch.uint8).flatten()[: weight.numel() // 2].view(*shape, GROUP // 2)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(shape, 120, dtype=torch.uint8)}


def _compressed(kind: str, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


FORMATS = {
    "bfloat16": Format(QWEN3, torch.bfloat16),
    "float16": Format(QWEN3, torch.float16),
    "float32": Format(QWEN3, torch.float32),
    "fp8": Format(QWEN3, torch.bfloat16, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, _fp8),
    "int8": Format(
        QWEN3,
        torch.bfloat16,
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        _int8,
    ),
    "int4": Format(
        QWEN3,
        torch.bfloat16,
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=BLOCK),
        _int4,
    ),
    "experts": Format(GPT_OSS, torch.bfloat16),
    "experts, mxfp4": Format(GPT_OSS, torch.bfloat16, {"quant_method": "mxfp4"}, _mxfp4),
}


def write(folder: Path, found: Format, num_weights: float) -> None:
    """A folder of shards, with as many layers as make about `num_weights`."""
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul(0.02)
    raw = found.base | {"num_hidden_layers": _layers(found.base, num_weights)}
    if found.quantization is not None:
        raw["quantization_config"] = found.quantization
    (folder / "config.json").write_text(json.dumps(raw))
    shard: Tensors = {}
    file_of: dict[str, str] = {}
    for name, weight in weights_of(_parse(raw)).items():
        numel = int(torch.Size(weight.shape).numel())
        tensor = noise.repeat(-(-numel // NOISE))[:numel].view(weight.shape).to(found.dtype)
        is_inner = len(weight.shape) > 1 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if found.store is not None and is_inner and (found.base is QWEN3 or len(weight.shape) == 3):
            shard |= found.store(name, tensor.float())
        else:
            shard[name] = tensor
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            _save(folder, shard, file_of)
    _save(folder, shard, file_of)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def _parse(raw: dict[str, Any]) -> Any:  # noqa: ANN401  the Config of any architecture
    return ARCHITECTURES[raw["architectures"][0]].parse(raw)


def _layers(base: dict[str, Any], num_weights: float) -> int:
    def count(layers: int) -> int:
        weights = weights_of(_parse(base | {"num_hidden_layers": layers}))
        return sum(torch.Size(weight.shape).numel() for weight in weights.values())

    one = count(1)
    return max(2, round(1 + (num_weights - one) / (count(2) - one)))


def _save(folder: Path, shard: Tensors, file_of: dict[str, str]) -> None:
    file = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
    save_file(shard, folder / file)
    file_of |= dict.fromkeys(shard, file)
    shard.clear()


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` ranks as loading sees it, which exchanges nothing."""

    index: int
    size: int

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        raise NotImplementedError

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        raise NotImplementedError

    def broadcast(self, x: torch.Tensor) -> None:
        raise NotImplementedError


def measure(folder: Path, rank: Rank, cache_dir: Path) -> dict[str, float]:
    """Memory of the first load in this process, `held` being what stays; times of the fastest of some."""
    torch.set_num_threads(1)
    ops = operators("cpu", cache_dir)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _memory()
    times: list[tuple[float, float]] = []
    memory: list[dict[str, int]] = []
    for _ in range(REPEATS):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        model = load(folder, ops, lambda _done_bytes, _total_bytes: None, Sharing(rank))
        times.append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
        memory.append(_memory())
        assert bool(model.fingerprint) == (rank.index == LEADER)
        del model
    after, (cpu_s, wall_s) = memory[0], min(times)
    held = after["VmRSS"] - before["VmRSS"]
    return {"cpu_s": cpu_s, "wall_s": wall_s, "held": held, "peak": after["VmHWM"] - before["VmRSS"]}


def _memory() -> dict[str, int]:
    """Return memory figures in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name.rstrip(":"): 1024 * int(kib) for name, kib, _ in fields}


def _measured(folder: Path, rank: Rank, options: argparse.Namespace) -> dict[str, float]:
    """Measure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.engine.loading", f"--cache-dir={options.cache_dir}"]
    command += [f"--measure={folder}", f"--rank={rank.index}", f"--ranks={rank.size}"]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own command
    return json.loads(ran.stdout)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One for each format and rank measured."""
    for name, found in FORMATS.items():
        if options.only and name not in options.only:
            continue
        with TemporaryDirectory() as folder:
            write(Path(folder), found, options.weights)
            stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            for rank in (Rank(0, 1), Rank(0, RANKS), Rank(1, RANKS)):
                yield {"format": name, "stored": stored, "rank": rank.index, "ranks": rank.size} | _measured(
                    Path(folder), rank, options
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.loading", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--weights", type=float, default=500e6)
    parser.add_argument("--only", nargs="*", choices=FORMATS)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, Rank(options.rank, options.ranks), options.cache_dir)))
        return
    found = list(rows(options))
    table = Table("format", "rank", "stored GB", "held GB", "peak / held", "CPU s", "CPU s per stored GB")
    for row in found:
        table.add_row(
            row["format"],
            f"{row['rank']} of {row['ranks']}",
            f"{row['stored'] / 1e9:.2f}",
            f"{row['held'] / 1e9:.2f}",
            f"{row['peak'] / row['held']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['cpu_s'] / row['stored'] * 1e9:.2f}",
        )
    Console().print(table)
    if not options.only and options.weights == parser.get_default("weights"):
        figures = {"command": "python -m benchmarks.engine.loading", "rows": found}
        RESULT.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
