"""Released models' config.json: what layers keep, sizes of groups, facts of long texts, and refusals."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tidemill.kvstore.layout import Attention, Latent, LayerSpec, Linear, Window
from tidemill.workers.models.architectures import deepseek, gpt_oss, granite, qwen3
from tidemill.workers.models.architectures.config import ArchitectureConfig, sizes, weights_of
from tidemill.workers.models.architectures.registry import compute_dtype_of, sizes_of
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.latent import LatentConfig
from tidemill.workers.models.layers.mamba2 import Mamba2Config
from tidemill.workers.models.loading.sharding import RankPart, RankSlice

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
# From the folder of gpt-oss-20b, with four layers.
OSS: dict[str, Any] = json.loads(
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
# From the folder of granite-4.0-h-tiny, with two layers.
TINY: dict[str, Any] = json.loads(
    """{
    "attention_bias": false, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
    "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
    "layer_types": ["mamba", "attention"], "logits_scaling": 6,
    "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": false, "max_position_embeddings": 131072, "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 2, "num_key_value_heads": 4, "num_local_experts": 64,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
    "rope_theta": 10000, "shared_intermediate_size": 1024, "tie_word_embeddings": true, "vocab_size": 100352
    }"""
)
PARSERS: dict[str, tuple[Callable[[dict[str, Any]], ArchitectureConfig], dict[str, Any]]] = {
    "deepseek": (deepseek.parse, V3),
    "gpt-oss": (gpt_oss.parse, OSS),
    "granite": (granite.parse, TINY),
}
WINDOW, EVERYTHING = Window(kv_heads=8, head_dim=64, tokens=128), Attention(kv_heads=8, head_dim=64)
MAMBA, GROUPED = (
    Linear(key_heads=8, value_heads=48, key_dim=128, value_dim=64, conv_width=4),
    Attention(kv_heads=4, head_dim=128),
)
NAMES_OF_LAYERS = {"layer_types": None, "layers_block_type": ["linear_attention", "full_attention"]}
ATTENTION_ALONE = {
    "layer_types": ["attention"] * 2,
    "mamba_n_heads": 7,  # which would fit nothing
    "position_embedding_type": "rope",
}


def parsed(name: str, **changes: object) -> ArchitectureConfig:
    """Return the config with these changes; a key that is changed to None is left out."""
    parse, raw = PARSERS[name]
    absent = {key for key, value in changes.items() if value is None and key == "layer_types"}
    return parse({key: value for key, value in (raw | changes).items() if key not in absent})


@pytest.mark.parametrize(
    ("name", "changes", "specs", "groups"),
    [
        # Latents are copied, only queries are shared.
        ("deepseek", {}, (Latent(width=576),) * 5, (1, 2, 4, 8, 16, 32, 64, 128)),
        # More ranks than KV heads have copies of them.
        ("gpt-oss", {}, (WINDOW, EVERYTHING) * 2, (1, 2, 4, 8, 16, 32, 64)),
        ("gpt-oss", {"layer_types": None}, (WINDOW, EVERYTHING) * 2, (1, 2, 4, 8, 16, 32, 64)),
        ("granite", {}, (MAMBA, GROUPED), (1, 2, 4)),
        ("granite", {"layer_types": ["linear_attention", "full_attention"]}, (MAMBA, GROUPED), (1, 2, 4)),
        ("granite", NAMES_OF_LAYERS, (MAMBA, GROUPED), (1, 2, 4)),
        ("granite", ATTENTION_ALONE, (GROUPED,) * 2, (1, 2, 4, 12)),
    ],
)
def test_layers_and_sizes_of_groups_are_those_of_the_config(
    name: str, changes: dict[str, object], specs: tuple[LayerSpec, ...], groups: tuple[int, ...]
) -> None:
    config = parsed(name, **changes)
    assert config.specs == specs
    if specs == parsed(name).specs:
        assert config == parsed(name), "other names of the same layers"
    assert sizes(config) == groups
    assert config.max_length == PARSERS[name][1]["max_position_embeddings"]


def test_scores_are_scaled_for_longer_texts_than_the_model_was_made_for() -> None:
    """0.1 ln(40) + 1, squared, as the authors of DeepSeek-V3 have it; cos and sin are not scaled then."""
    mixers = [parsed("deepseek", **changes).layers[0].mixer for changes in ({}, {"rope_scaling": None})]
    latent, plain = (mixer for mixer in mixers if isinstance(mixer, LatentConfig))
    assert latent.scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert latent.rope.scale == 1
    assert plain.scale == pytest.approx(192**-0.5)
    rope = parsed("gpt-oss").layers[0].mixer.rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.dim, rope.truncate) == ("yarn", 150_000.0, 64, False)
    assert rope.scale == pytest.approx(1.3465736)  # 0.1 ln(32) + 1


# From the folder of Llama-2-7b, with one layer.
LLAMA_2: dict[str, Any] = json.loads(
    """{
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "tie_word_embeddings": false, "vocab_size": 32000
    }"""
)


@pytest.mark.parametrize("kind", [None, "dynamic", "linear"])
@pytest.mark.parametrize("theta", [{}, {"rope_theta": None}, {"rope_theta": 500_000.0}])
def test_llama_rotates_as_in_transformers(theta: dict[str, object], kind: str | None) -> None:
    raw = LLAMA_2 | theta | {"rope_scaling": kind and {"type": kind, "factor": 2.0}}
    rope = qwen3.parse_llama(raw).layers[0].mixer.rope
    assert rope is not None
    given: dict[str, Any] = {key: value for key, value in raw.items() if value is not None}
    reference: Any = LlamaRotaryEmbedding(LlamaConfig(**given))
    assert torch.allclose(rope.frequencies(torch.device("cpu")), reference.inv_freq)
    assert rope.scale == reference.attention_scaling


def test_layer_that_predicts_further_tokens_is_not_asked_for() -> None:
    assert not [name for name in weights_of(parsed("deepseek")) if name.startswith("model.layers.5.")]


def mamba(config: ArchitectureConfig) -> Mamba2Config:
    found = config.layers[0].mixer
    assert isinstance(found, Mamba2Config)
    return found


@pytest.mark.parametrize(
    ("heads", "groups", "runs"),
    [(48, 1, 8), (6, 1, 2), (5, 1, 1), (64, 8, 8), (48, 2, 8), (48, 3, 3), (24, 6, 6)],
)
def test_head_groups_are_runs_of_heads_that_share_b_and_c(heads: int, groups: int, runs: int) -> None:
    """Ranks that divide the runs divide the groups, or are divided by them."""
    changes = {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_head": "auto", "hidden_size": 480}
    config = mamba(granite.parse(TINY | changes))
    assert (config.spec.key_heads, config.bc_groups) == (runs, groups)
    for size in (size for size in range(1, runs + 1) if runs % size == 0):
        for weight in config.weights(480).values():
            assert weight.part(RankPart(size - 1, size)).ranges


@pytest.mark.parametrize(
    ("index", "size", "ranges"),
    [
        (0, 1, ((0, 12), (12, 24), (24, 28), (28, 32), (32, 36))),
        (1, 2, ((6, 12), (18, 24), (26, 28), (30, 32), (34, 36))),
        (1, 4, ((3, 6), (15, 18), (24, 26), (28, 30), (33, 34))),
        (2, 4, ((6, 9), (18, 21), (26, 28), (30, 32), (34, 35))),
    ],
)
def test_ranks_read_their_part_of_the_projection(
    index: int, size: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    """Its heads of z, x and dt, and the B and C that they use: of two groups, two ranks of four have each."""
    spec = Linear(key_heads=4, value_heads=4, key_dim=2, value_dim=3, conv_width=2)
    config = Mamba2Config(spec=spec, bc_groups=2, norm_groups=2)
    assert config.weights(5)["mamba.in_proj.weight"].part(RankPart(index, size)) == RankSlice(ranges)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        ([0.01, 0.5], (0.01, 0.5)),
        ([0.0, {"__float__": "Infinity"}], (0, float("inf"))),
        (json.loads("[0, Infinity]"), (0, float("inf"))),
        (None, (0, float("inf"))),
    ],
    ids=str,
)
def test_bounds_of_a_time_step(limit: object, wanted: tuple[float, float]) -> None:
    config = mamba(parsed("granite", time_step_limit=limit))
    assert (config.dt_min, config.dt_max) == wanted


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func 'softmax': only sigmoid"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method 'greedy': only noaux_tc"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek", {"n_group": 7}, "256 experts in 7 groups"),
        ("deepseek", {"topk_group": 9}, "256 experts in 8 groups, of which tokens choose from 9"),
        ("deepseek", {"n_routed_experts": 8}, "8 experts in 8 groups"),
        ("deepseek", {"topk_group": 1, "num_experts_per_tok": 33}, "33 experts for each token, of 32"),
        ("deepseek", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("gpt-oss", {"num_experts_per_tok": 33}, "33 experts for each token, of 32"),
        ("gpt-oss", {"sliding_window": None}, "sliding_window is None: a positive number"),
        ("gpt-oss", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("gpt-oss", {"num_key_value_heads": 7}, "no multiple of num_key_value_heads"),
        ("granite", {"mamba_n_groups": 5}, "mamba_n_heads is no multiple of mamba_n_groups"),
        (
            "granite",
            {"mamba_d_head": 32},
            r"mamba_n_heads \* mamba_d_head is not mamba_expand \* hidden_size",
        ),
        ("granite", {"time_step_limit": [0, "much"]}, "time_step_limit has 'much': a number is needed"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi': not supported"),
        ("granite", {"layer_types": ["mamba", "mlp"]}, r"layer_types has \['mlp'\]: not supported"),
        ("granite", {"mamba_d_state": None}, "mamba_d_state is None: a positive number is needed"),
        ("granite", {"hidden_act": "gelu"}, "only silu is supported"),
        ("granite", {"num_key_value_heads": 5}, "num_attention_heads is no multiple"),
    ],
    ids=str,
)
def test_unsupported_configs_are_refused(name: str, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parsed(name, **changes)


ODD: list[Any] = [
    *(None, True, -1, 0, 7, 1.5, float("inf"), "x", "\ud800", [], [[]], {}, {"a": {}}, 10**18),
    *({"rope_type": kind, "factor": factor} for kind in ("yarn", "llama3", "linear") for factor in (0, "x")),
]
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": V3,
    "GptOssForCausalLM": OSS,
    "GraniteMoeHybridForCausalLM": TINY,
    "LlamaForCausalLM": LLAMA_2,
    "Qwen3_5ForConditionalGeneration": {"text_config": LLAMA_2},
}
OTHERS = (
    "rope_parameters",
    "rope_scaling",
    "head_dim",
    "partial_rotary_factor",
    "torch_dtype",
    "architectures",
)


@given(name=st.sampled_from(sorted(FAMILIES)), at=st.integers(0, 99), odd=st.sampled_from(range(len(ODD))))
def test_any_value_of_any_key_is_loaded_or_refused(name: str, at: int, odd: int) -> None:
    raw = {"architectures": [name], **FAMILIES[name]}
    keys = [*raw, *OTHERS]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**raw, keys[at % len(keys)]: ODD[odd]}))
        with suppress(ModelError):
            sizes_of(Path(folder), compute_dtype_of(Path(folder), "dummy"), load_format="dummy")
