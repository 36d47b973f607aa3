"""Models that the servers share: random ones in bfloat16 or with matrices as integers, and SmolLM2."""

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.workers.smollm2 import smollm2_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.kernels import HYBRID_77M
from benchmarks.peers.servers import CONTEXT_TOKENS, make_llama_cpp
from benchmarks.peers.works import VOCAB
from tidemill.kernels.linear.stored import Stored
from tidemill.workers.models.loading.quantise import Recipe, quantised

END = "<|end|>"

COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT_TOKENS,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.04,
}
DENSE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "head_dim": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", DENSE),
    "dense-457m": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "head_dim": 128,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "hybrid": ("Qwen3NextConfig", HYBRID_77M),
    "dense-hybrid": (
        "Qwen3_5TextConfig",
        {
            **DENSE,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}
"""Random models: two dense ones, one of linear attention and experts, and a dense one with some of it."""

INTEGERS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "int8": (
        Recipe("int8"),
        {
            "format": "int-quantized",
            "weights": {"num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
        },
    ),
    "int4": (
        Recipe("int4", columns=128),
        {
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "dynamic": False},
        },
    ),
}
"""The matrices of layers as compressed-tensors keeps them, with its words: a model is a random one's name, a
hyphen and one of these."""

SMOLLM2 = {"smollm2-Q4_1", "smollm2-Q8_0"}
NAMES = [*MODELS, *(f"dense-{kind}" for kind in INTEGERS), *sorted(SMOLLM2)]


def make_model(folder: Path, name: str) -> Path:
    """Return the folder or the GGUF file of a model, made once."""
    if name in SMOLLM2:
        return _smollm2(folder, name)
    target = folder / name
    if (target / "tokenizer.json").exists():
        return target
    base, _, kind = name.rpartition("-")
    if kind in INTEGERS:
        _write_integers(make_model(folder, base), target, kind)
    else:
        _write_random(target, name)
    return target


def _smollm2(folder: Path, name: str) -> Path:
    kind, source = name.removeprefix("smollm2-"), smollm2_file()
    target = folder / f"{name}.gguf"
    if kind in source.name or target.exists():
        return source if kind in source.name else target
    quantize = make_llama_cpp(folder) / "build/bin/llama-quantize"
    subprocess.run([quantize, "--allow-requantize", source, target, kind], check=True)  # noqa: S603 - our own
    return target


def _write_integers(source: Path, target: Path, kind: str) -> None:
    """Write a folder of floats with the matrices of its layers as integers."""
    recipe, words = INTEGERS[kind]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("tokenizer.json"))
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        whole = tensors.pop(name)
        codes = quantised(Stored(whole, "bfloat16"), recipe)
        assert codes.scales is not None
        tensors[f"{name}_scale"] = codes.scales.bfloat16()
        if kind == "int8":
            tensors[name] = codes.codes
        else:
            tensors[f"{name}_packed"] = codes.codes.view(torch.int32)
            tensors[f"{name}_shape"] = torch.tensor(whole.shape)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    parts = {
        name: {"type": "int", "symmetric": True} | part
        for name, part in words.items()
        if isinstance(part, dict)
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": words["format"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": words["format"]} | parts},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", target)


def _write_random(target: Path, name: str) -> None:
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
