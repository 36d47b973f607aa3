"""The config of DeepSeek-V3's config.json: latents, scales, the choice of experts, and refusals."""

import json
from typing import Any

import pytest

from tidemill.kvstore.layout import Latent
from tidemill.workers.models.architectures.config import sizes, weights_of
from tidemill.workers.models.architectures.deepseek import parse
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.latent import LatentConfig
from tidemill.workers.models.layers.mlp import DenseConfig
from tidemill.workers.models.layers.moe import MoeConfig

# From the folder of DeepSeek-V3, with five layers.
V3: dict[str, Any] = json.loads(
    """{
    "attention_bias": false, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 5,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 129280
    }"""
)


def latent(**changes: object) -> LatentConfig:
    mixer = parse(V3 | changes).layers[0].mixer
    assert isinstance(mixer, LatentConfig)
    return mixer


def experts(**changes: object) -> MoeConfig:
    mlp = parse(V3 | changes).layers[-1].mlp
    assert isinstance(mlp, MoeConfig)
    return mlp


def test_every_layer_keeps_one_latent_per_token() -> None:
    config = parse(V3)
    assert config.specs == (Latent(width=576),) * 5
    assert config.max_length == 163_840
    assert sizes(config) == (1, 2, 4, 8, 16, 32, 64, 128), "latents are copied, only queries are shared"


def test_first_layers_are_dense() -> None:
    kinds = [type(layer.mlp) for layer in parse(V3).layers]
    assert kinds == [DenseConfig] * 3 + [MoeConfig] * 2
    assert {type(layer.mlp) for layer in parse(V3 | {"first_k_dense_replace": 0}).layers} == {MoeConfig}


def test_choice_of_experts() -> None:
    router, shared = experts().router, experts(n_shared_experts=2).shared
    assert (router.score, router.renormalise, router.scale) == ("sigmoid", True, 2.5)
    assert (router.top_k, router.groups, router.groups_kept) == (8, 8, 4)
    assert router.choice_bias == "mlp.gate.e_score_correction_bias"
    assert shared is not None
    assert shared.inner == 2 * 2048
    assert experts(n_shared_experts=None).shared is None


def test_scores_are_scaled_for_longer_texts_than_it_was_made_for() -> None:
    """0.1 ln(40) + 1, squared, as the authors' own code has it; cos and sin are not scaled then."""
    assert latent().scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert latent().rope.scale == 1
    assert latent(rope_scaling=None).scale == pytest.approx(192**-0.5)


def test_projections_of_queries() -> None:
    names = latent().weights(7168)
    assert names["self_attn.q_b_proj.weight"].shape == (128 * 192, 1536)
    plain = latent(q_lora_rank=None, attention_bias=True).weights(7168)
    assert plain["self_attn.q_proj.weight"].shape == (128 * 192, 7168)
    assert not [name for name in plain if "q_a" in name]
    assert plain["self_attn.kv_a_proj_with_mqa.bias"].shape == (576,)


def test_layer_that_predicts_further_tokens_is_not_asked_for() -> None:
    assert not [name for name in weights_of(parse(V3)) if name.startswith("model.layers.5.")]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax': only sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy': only noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"n_group": 7}, "256 experts in 7 groups"),
        ({"topk_group": 9}, "256 experts in 8 groups, of which tokens choose from 9"),
        ({"n_routed_experts": 8}, "8 experts in 8 groups"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "33 experts for each token, of 32"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse(V3 | changes)
