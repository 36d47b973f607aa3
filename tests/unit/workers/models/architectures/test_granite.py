"""The config of Granite 4's config.json: head groups, bounds, names of layers, and refusals."""

import json
from typing import Any

import pytest

from tidemill.kvstore.layout import Attention, Linear
from tidemill.workers.models.architectures.config import ArchitectureConfig, sizes
from tidemill.workers.models.architectures.granite import parse
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.layers.mamba2 import Mamba2Config
from tidemill.workers.models.layers.mlp import DenseConfig
from tidemill.workers.models.layers.moe import MoeConfig
from tidemill.workers.models.loading.sharding import RankPart, RankSlice

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


def mamba(config: ArchitectureConfig) -> Mamba2Config:
    found = config.layers[0].mixer
    assert isinstance(found, Mamba2Config)
    return found


def attention(config: ArchitectureConfig) -> AttentionConfig:
    found = config.layers[-1].mixer
    assert isinstance(found, AttentionConfig)
    return found


def test_tiny() -> None:
    config = parse(TINY)
    assert config.specs == (
        Linear(key_heads=8, value_heads=48, key_dim=128, value_dim=64, conv_width=4),
        Attention(kv_heads=4, head_dim=128),
    )
    assert (mamba(config).bc_groups, mamba(config).norm_groups) == (1, 1)
    assert (mamba(config).dt_min, mamba(config).dt_max) == (0, float("inf"))
    assert (attention(config).rope, attention(config).scale) == (None, 0.0078125)
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (12, 0.22, 1 / 6)
    assert isinstance(config.layers[0].mlp, MoeConfig)
    assert sizes(config) == (1, 2, 4)


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_layers_have_two_names_under_two_keys(key: str) -> None:
    raw = {name: value for name, value in TINY.items() if name != "layer_types"}
    assert parse(raw | {key: ["linear_attention", "full_attention"]}) == parse(TINY)


@pytest.mark.parametrize(
    ("heads", "groups", "runs"),
    [(48, 1, 8), (6, 1, 2), (5, 1, 1), (64, 8, 8), (48, 2, 8), (48, 3, 3), (24, 6, 6)],
)
def test_head_groups_are_runs_of_heads_that_share_b_and_c(heads: int, groups: int, runs: int) -> None:
    """Ranks that divide the runs divide the groups, or are divided by them."""
    changes = {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_head": "auto", "hidden_size": 480}
    config = mamba(parse(TINY | changes))
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
    config = mamba(parse(TINY | {"time_step_limit": limit}))
    assert (config.dt_min, config.dt_max) == wanted


def test_without_experts_there_is_the_shared_mlp_alone() -> None:
    mlp = parse(TINY | {"num_local_experts": 0, "num_experts_per_tok": 0}).layers[0].mlp
    assert isinstance(mlp, DenseConfig)
    assert mlp.inner == 1024


def test_model_of_attention_alone() -> None:
    """Its sizes of Mamba fit nothing."""
    config = parse(
        TINY
        | {"layer_types": ["attention"] * 2, "mamba_n_heads": 7, "position_embedding_type": "rope"}
        | {"attention_bias": True}
    )
    assert config.specs == (Attention(kv_heads=4, head_dim=128),) * 2
    rope = attention(config).rope
    assert rope is not None
    assert (rope.dim, rope.theta) == (128, 10000)
    assert attention(config).bias
    assert attention(config).out_bias
    assert sizes(config) == (1, 2, 4, 12)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mamba_n_groups": 5}, "mamba_n_heads is no multiple of mamba_n_groups"),
        ({"mamba_d_head": 32}, r"mamba_n_heads \* mamba_d_head is not mamba_expand \* hidden_size"),
        ({"time_step_limit": [0, "much"]}, "time_step_limit has 'much': a number is needed"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi': not supported"),
        ({"layer_types": ["mamba", "mlp"]}, r"layer_types has \['mlp'\]: not supported"),
        ({"mamba_d_state": None}, "mamba_d_state is None: a positive number is needed"),
        ({"hidden_act": "gelu"}, "only silu is supported"),
        ({"num_key_value_heads": 5}, "num_attention_heads is no multiple"),
    ],
    ids=str,
)
def test_impossible_configs_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        parse(TINY | changes)
