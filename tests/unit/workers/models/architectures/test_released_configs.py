"""Released models' config.json: what layers keep, sizes of groups, facts of long texts, and refusals."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from benchmarks.engine.released import RELEASED
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

V3 = RELEASED["DeepSeek-V3"] | {"num_hidden_layers": 5, "num_nextn_predict_layers": 1}
OSS = RELEASED["gpt-oss-20b"] | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GRANITE = RELEASED["granite-4.0-h-small"] | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
PARSERS: dict[str, tuple[Callable[[dict[str, Any]], ArchitectureConfig], dict[str, Any]]] = {
    "deepseek": (deepseek.parse, V3),
    "gpt-oss": (gpt_oss.parse, OSS),
    "granite": (granite.parse, GRANITE),
}
WINDOW, EVERYTHING = Window(kv_heads=8, head_dim=64, tokens=128), Attention(kv_heads=8, head_dim=64)
MAMBA, GROUPED = (
    Linear(key_heads=8, value_heads=128, key_dim=128, value_dim=64, conv_width=4),
    Attention(kv_heads=8, head_dim=128),
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
        ("granite", {}, (MAMBA, GROUPED), (1, 2, 4, 8)),
        ("granite", {"layer_types": ["linear_attention", "full_attention"]}, (MAMBA, GROUPED), (1, 2, 4, 8)),
        ("granite", NAMES_OF_LAYERS, (MAMBA, GROUPED), (1, 2, 4, 8)),
        ("granite", ATTENTION_ALONE, (GROUPED,) * 2, (1, 2, 4, 8, 16, 32)),
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


LLAMA = RELEASED["Llama-3.1-8B"] | {"num_hidden_layers": 1}


@pytest.mark.parametrize("kind", [None, "dynamic", "linear"])
@pytest.mark.parametrize("theta", [{}, {"rope_theta": None}, {"rope_theta": 500_000.0}])
def test_llama_rotates_as_in_transformers(theta: dict[str, object], kind: str | None) -> None:
    raw = LLAMA | theta | {"rope_scaling": kind and {"type": kind, "factor": 2.0}}
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
    config = mamba(granite.parse(GRANITE | changes))
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
    "GraniteMoeHybridForCausalLM": GRANITE,
    "LlamaForCausalLM": LLAMA,
    "Qwen3_5ForConditionalGeneration": {"text_config": LLAMA},
}
OTHERS = (
    *("rope_parameters", "rope_scaling", "head_dim", "partial_rotary_factor", "torch_dtype", "hidden_act"),
    *("rms_norm_eps", "tie_word_embeddings", "moe_layer_freq", "q_lora_rank", "time_step_limit"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("mamba_proj_bias", "mamba_conv_bias"),
)


@given(name=st.sampled_from(sorted(FAMILIES)), at=st.integers(0, 99), odd=st.sampled_from(range(len(ODD))))
def test_any_value_of_any_key_is_loaded_or_refused(name: str, at: int, odd: int) -> None:
    raw = {"architectures": [name], **FAMILIES[name]}
    keys = [*raw, *OTHERS]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**raw, keys[at % len(keys)]: ODD[odd]}))
        with suppress(ModelError):
            sizes_of(Path(folder), compute_dtype_of(Path(folder), "dummy"), load_format="dummy")
