"""The config of gpt-oss's config.json: alternating windows, sinks, experts, and refusals."""

import json
from typing import Any

import pytest

from tidemill.kvstore.layout import Attention, Window
from tidemill.workers.models.architectures.config import sizes, weights_of
from tidemill.workers.models.architectures.gpt_oss import parse
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.layers.moe import MoeConfig

# From the folder of gpt-oss-20b, with four layers.
SMALL: dict[str, Any] = json.loads(
    """{
    "attention_bias": true, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
    "vocab_size": 201088
    }"""
)


def test_windows_and_all_tokens_by_turns() -> None:
    window, everything = Window(kv_heads=8, head_dim=64, tokens=128), Attention(kv_heads=8, head_dim=64)
    for raw in (SMALL, {key: value for key, value in SMALL.items() if key != "layer_types"}):
        config = parse(raw)
        assert config.specs == (window, everything) * 2
        assert sizes(config) == (1, 2, 4, 8, 16, 32, 64), "more ranks than KV heads have copies of them"
        for layer in config.layers:
            assert isinstance(layer.mixer, AttentionConfig)
            assert layer.mixer.sinks
            assert layer.mixer.bias
            assert layer.mixer.out_bias


def test_positions_beyond_those_it_was_trained_for() -> None:
    rope = parse(SMALL).layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.dim, rope.truncate) == ("yarn", 150_000.0, 64, False)
    assert rope.scale == pytest.approx(1.3465736)  # 0.1 ln(32) + 1


def test_experts_by_the_names_of_its_folder() -> None:
    experts = parse(SMALL | {"swiglu_limit": 5.0}).layers[0].mlp
    assert isinstance(experts, MoeConfig)
    assert (experts.activation, experts.limit, experts.router.top_k) == ("clamped", 5.0, 4)
    shapes = {name: weight.shape for name, weight in weights_of(parse(SMALL)).items()}
    mlp = "model.layers.3.mlp"
    assert shapes[f"{mlp}.router.bias"] == (32,)
    assert shapes[f"{mlp}.experts.gate_up_proj"] == (32, 2880, 5760)
    assert shapes[f"{mlp}.experts.gate_up_proj_bias"] == (32, 5760)
    assert shapes[f"{mlp}.experts.down_proj"] == (32, 2880, 2880)
    assert shapes["model.layers.3.self_attn.sinks"] == (64,)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts_per_tok": 33}, "33 experts for each token, of 32"),
        ({"sliding_window": None}, "sliding_window is None: a positive number"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"num_key_value_heads": 7}, "no multiple of num_key_value_heads"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse(SMALL | changes)
