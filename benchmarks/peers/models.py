"""Random models in bfloat16 with a tokenizer, which the servers compared share."""

import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.kernels import HYBRID_77M
from benchmarks.peers.servers import CONTEXT_TOKENS

VOCAB = 8192
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
