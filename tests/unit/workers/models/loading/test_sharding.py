"""Parts of weights: the ranks have every row once, or in equal copies, and heads that belong together."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.parity.heads import SHAPE
from tidemill.kvstore.shards import heads_fit
from tidemill.workers.models.architectures import deepseek, gpt_oss, granite, qwen3_next
from tidemill.workers.models.architectures.config import ArchitectureConfig, local, sizes, weights_of
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.sharding import (
    ByHeadRuns,
    ByHeads,
    Cut,
    EvenRuns,
    OneRank,
    RankPart,
    RankSlice,
    Replicated,
    part_of,
)
from tidemill.workers.models.loading.weights import Weight

BASE = SHAPE | {"linear_num_key_heads": 4, "num_experts": 0}
EXPERTS = {"num_experts": 5}
ATTENTION: dict[str, Any] = {"layer_types": ["full_attention"] * 3}
GPT_OSS: dict[str, Any] = BASE | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
GRANITE: dict[str, Any] = BASE | {
    "layer_types": ["mamba", "attention", "mamba"],
    "hidden_size": 48,
    "shared_intermediate_size": 30,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 12,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
}
DEEPSEEK: dict[str, Any] = BASE | {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 19,
}
MODELS: dict[str, ArchitectureConfig] = {
    "dense, tied": qwen3_next.parse(BASE | {"tie_word_embeddings": True}),
    "experts, one KV head": qwen3_next.parse(
        BASE | EXPERTS | {"num_key_value_heads": 1, "linear_num_value_heads": 8, "attention_bias": True}
    ),
    "attention only": qwen3_next.parse(BASE | ATTENTION | {"num_attention_heads": 12}),
    "stacked experts": qwen3_next.parse_qwen3_5(BASE | EXPERTS),
    "woven experts": gpt_oss.parse(GPT_OSS),
    "mamba": granite.parse(GRANITE),
    "latent": deepseek.parse(DEEPSEEK),
}


def rows_of(part: RankSlice) -> list[int]:
    return [row for start, end in part.ranges for row in range(start, end)]


def check_cover(cut: Cut, rows: int, size: int) -> None:
    parts = [part_of(cut, rows, index, size) for index in range(size)]
    owners = Counter(row for part in parts for row in rows_of(part))
    assert set(owners) == set(range(rows))
    start = 0
    for run in [run for _, run in cut.runs] if isinstance(cut, ByHeadRuns) else [rows]:
        copies = {owners[row] for row in range(start, start + run)}
        assert len(copies) == 1, "some rows have more copies than others"
        start += run
    lengths = {len(rows_of(part)) + part.zeros * len(part.ranges) for part in parts}
    whole_elsewhere = isinstance(cut, OneRank) and not cut.zeros and size > 1
    assert len(lengths) == 1 + whole_elsewhere, "one part is larger than another"


@given(st.integers(1, 12), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 12))
def test_heads_are_had_once_or_in_equal_copies(count: int, head_rows: list[int], size: int) -> None:
    cut = ByHeads(count, tuple(count * rows for rows in head_rows))
    if not heads_fit(count, size):
        with pytest.raises(AssertionError):
            part_of(cut, sum(cut.runs), 0, size)
        return
    check_cover(cut, sum(cut.runs), size)
    for index in range(size):
        part = part_of(cut, sum(cut.runs), index, size)
        heads = [
            [(row - sum(cut.runs[:run])) // head_rows[run] for row in range(*part.ranges[run])]
            for run in range(len(cut.runs))
        ]
        assert {frozenset(run) for run in heads} == {frozenset(heads[0])}, "runs of different heads"
        assert not part.zeros


@given(st.integers(1, 50), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_even_parts_run_by_run_are_the_tensor(count: int, step: int, runs: int, size: int) -> None:
    cut, run_rows = EvenRuns(runs=runs, dim=1, step=step), count * step
    check_cover(cut, runs * run_rows, size)
    parts = [part_of(cut, runs * run_rows, index, size) for index in range(size)]
    for run in range(runs):
        found = [row for part in parts for row in range(*part.ranges[run])]
        assert found == list(range(run * run_rows, (run + 1) * run_rows))
    assert sum(part.zeros for part in parts) == -count % size * step
    assert all(edge % step == 0 for part in parts for edges in part.ranges for edge in edges), "a pair is cut"
    assert {part.dim for part in parts} == {1}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_tensor_of_a_model_is_there_once_or_in_equal_copies(config: ArchitectureConfig) -> None:
    for size in sizes(config):
        for weight in weights_of(config).values():
            for cut in (weight.cut, weight.terms, weight.by_expert):
                if cut is not None and not (isinstance(cut, OneRank) and cut.count % size):
                    check_cover(cut, weight.shape[cut.dim], size)
            assert weight.part(RankPart(size - 1, size)).dim == weight.cut.dim


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_inputs_of_a_projection_back_are_what_the_rank_has_computed(config: ArchitectureConfig) -> None:
    """Compare a rank's columns of `down` with its rows of `gate`, where ranks add up."""
    for size in sizes(config):
        weights = weights_of(config)
        for name, weight in weights.items():
            into = name.replace("down_proj.", "gate_proj.")
            for rank in (RankPart(index, size, sums=True) for index in range(size)):
                part = weight.part(rank)
                if "down_proj.weight" in name:
                    rows = weights[into].part(rank)
                    assert (part.ranges, part.zeros, part.dim) == (rows.ranges, rows.zeros, 1)
                if "o_proj.bias" in name and size > 1:
                    own = RankSlice(((0, 50),)) if rank.index == 0 else RankSlice(((0, 0),), zeros=50)
                    assert part == own


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 6), st.integers(1, 24))
def test_query_heads_are_where_their_kv_head_is(kv_heads: int, group: int, size: int) -> None:
    query_heads = kv_heads * group
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    config = qwen3_next.parse(BASE | ATTENTION | heads)
    if size not in sizes(config):
        assert query_heads % size or not heads_fit(kv_heads, size)
        return
    mixer = local(config, RankPart(size=size)).layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    assert (mixer.query_heads, mixer.spec.kv_heads) == (query_heads // size, max(1, kv_heads // size))
    head_dim, weights = mixer.spec.head_dim, weights_of(config)
    for index in range(size):
        (query_rows,), (key_rows,) = (
            weights[f"model.layers.0.self_attn.{name}.weight"].part(RankPart(index, size)).ranges
            for name in ("q_proj", "k_proj")
        )
        queries = {row // (2 * head_dim) for row in range(*query_rows)}
        keys = {row // head_dim for row in range(*key_rows)}
        assert {query // group for query in queries} == keys


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, (1, 2, 4)),
        ({"linear_num_key_heads": 2}, (1, 2)),
        ({"num_attention_heads": 6}, (1, 2)),
        (ATTENTION | {"num_attention_heads": 12}, (1, 2, 4, 6, 12)),
    ],
)
def test_sizes_of_groups_that_can_run_a_model(changes: dict[str, object], wanted: tuple[int, ...]) -> None:
    assert sizes(qwen3_next.parse(BASE | changes)) == wanted


PARTS = {
    "whole": RankSlice(((0, 24),)),
    "rows, then zeros": RankSlice(((3, 5), (20, 22)), zeros=2),
    "no rows": RankSlice(((4, 4),), zeros=3),
    "columns": RankSlice(((1, 3), (5, 7)), zeros=1, dim=1),
    "inner rows": RankSlice(((0, 2),), dim=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_part_is_the_same_whether_all_bytes_are_read_or_few(
    tmp_path: Path, part: RankSlice, dtype: torch.dtype
) -> None:
    tensor = torch.randn(24, 7, 4).to(dtype)
    save_file({"a": tensor, "b": torch.ones(3)}, tmp_path / "model.safetensors")
    pieces: list[torch.Tensor] = []
    for start, end in part.ranges:
        piece = tensor.narrow(part.dim, start, end - start).float()
        zeros = torch.zeros(tensor.shape).narrow(part.dim, 0, part.zeros)
        pieces += [piece, zeros]
    wanted = torch.cat(pieces, dim=part.dim)
    for digests in (True, False):
        done: list[int] = []
        checkpoint = WeightsFolder(
            tmp_path, lambda bytes_, _total, done=done: done.append(bytes_), digests=digests
        )
        checkpoint.check({"a": Weight((24, 7, 4), Replicated())}, lambda name: name == "b")
        found = checkpoint.read("a", part).codes
        assert found.dtype == (dtype if dtype == torch.bfloat16 else torch.float32)
        assert torch.equal(found.float(), wanted)
        found.fill_(7)
        assert torch.equal(checkpoint.read("a", part).codes.float(), wanted), "the file was written to"
        assert done == [tensor.nbytes, 2 * tensor.nbytes]
