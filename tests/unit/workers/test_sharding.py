# pyright: reportUnknownVariableType=false
# safetensors leaves a type parameter of its paths open.
"""Parts of weights: the ranks have every row once, or in equal copies, and heads that belong together."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.parity.sharded import BASE, MODELS, random_folder
from tidemill.kvstore.layout import Attention
from tidemill.workers.models.checkpoint import Checkpoint
from tidemill.workers.models.qwen3_next_config import parse, tensor_shapes
from tidemill.workers.models.qwen3_next_cuts import cut_of, local, sizes
from tidemill.workers.tp.sharding import Cut, Even, Heads, Part, Whole, heads_fit, part_of

CUTS = {
    "q_proj.weight": Heads(4, (96,)),
    "k_proj.bias": Heads(2, (24,)),
    "conv1d.weight": Heads(4, (32, 32, 48)),
    "A_log": Heads(4, (4,)),
    "down_proj.weight": Even(),
    "lm_head.weight": Even(),
    "mlp.gate.weight": Whole(),
    "q_norm.weight": Whole(),
}


def rows_of(part: Part) -> list[int]:
    return [row for start, end in part.ranges for row in range(start, end)]


def check_cover(cut: Cut, rows: int, size: int) -> None:
    parts = [part_of(cut, rows, index, size) for index in range(size)]
    owners = Counter(row for part in parts for row in rows_of(part))
    assert set(owners) == set(range(rows))
    assert len(set(owners.values())) == 1, "some rows have more copies than others"
    assert len({len(rows_of(part)) + part.zeros for part in parts}) == 1, "one part is larger than another"


@given(st.integers(1, 12), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 12))
def test_heads_are_had_once_or_in_equal_copies(count: int, head_rows: list[int], size: int) -> None:
    cut = Heads(count, tuple(count * rows for rows in head_rows))
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


@given(st.integers(1, 50), st.integers(1, 9))
def test_even_parts_end_to_end_are_the_tensor(rows: int, size: int) -> None:
    check_cover(Even(), rows, size)
    parts = [part_of(Even(), rows, index, size) for index in range(size)]
    assert [row for part in parts for row in rows_of(part)] == list(range(rows))
    assert sum(part.zeros for part in parts) == -rows % size


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_every_tensor_of_a_model_is_there_once_or_in_equal_copies(changes: dict[str, object]) -> None:
    config = parse(BASE | changes)
    for size in sizes(config):
        for name, shape in tensor_shapes(config).items():
            check_cover(cut_of(config, name, shape[0]), shape[0], size)


@pytest.mark.parametrize(("ending", "cut"), CUTS.items(), ids=CUTS)
def test_cuts(ending: str, cut: Cut) -> None:
    config = parse(
        BASE | MODELS["experts, one KV head"] | {"num_key_value_heads": 2, "linear_num_value_heads": 4}
    )
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name.endswith(ending)}
    assert shapes
    assert {cut_of(config, name, shape[0]) for name, shape in shapes.items()} == {cut}


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 6), st.integers(1, 24))
def test_query_heads_are_where_their_kv_head_is(kv_heads: int, group: int, size: int) -> None:
    query_heads = kv_heads * group
    config = parse(
        BASE
        | MODELS["attention only"]
        | {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    )
    if size not in sizes(config):
        assert query_heads % size or not heads_fit(kv_heads, size)
        return
    part = local(config, size)
    attention = part.layers[0]
    assert isinstance(attention, Attention)
    assert (part.heads.query_heads, attention.kv_heads) == (query_heads // size, max(1, kv_heads // size))
    head_dim = attention.head_dim
    for index in range(size):
        ranges = {
            name: part_of(
                cut_of(config, f"model.layers.0.self_attn.{name}.weight", rows), rows, index, size
            ).ranges
            for name, rows in (("q_proj", 2 * query_heads * head_dim), ("k_proj", kv_heads * head_dim))
        }
        queries = {row // (2 * head_dim) for row in range(*ranges["q_proj"][0])}
        keys = {row // head_dim for row in range(*ranges["k_proj"][0])}
        assert {query // group for query in queries} == keys


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, (1, 2, 4)),
        ({"linear_num_key_heads": 2}, (1, 2)),
        ({"num_attention_heads": 6}, (1, 2)),
        ({"layer_types": ["full_attention"] * 3, "num_attention_heads": 12}, (1, 2, 4, 6, 12)),
    ],
)
def test_sizes_of_groups_that_can_run_a_model(changes: dict[str, object], wanted: tuple[int, ...]) -> None:
    assert sizes(parse(BASE | changes)) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_the_same_whether_all_bytes_are_read_or_few(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = random_folder(tmp_path / "model")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    name = "model.layers.0.linear_attn.conv1d.weight"
    parts = (
        Part(((0, len(tensors[name])),)),
        Part(((3, 5), (20, 24)), zeros=2),
        Part(((4, 4),), zeros=3),
    )
    done: list[int] = []
    whole, few = (
        Checkpoint(folder, lambda bytes_, _total: done.append(bytes_), digests=digests)
        for digests in (True, False)
    )
    for part in parts:
        rows = [tensors[name][start:end] for start, end in part.ranges]
        wanted = torch.cat([*rows, torch.zeros(part.zeros, *tensors[name].shape[1:])]).float()
        for checkpoint in (whole, few):
            found = checkpoint.read(name, part)
            assert found.dtype == dtype
            assert torch.equal(found, wanted)
    assert done == [tensors[name].nbytes * i for i in (1, 1, 2, 2, 3, 3)]
