"""Flags of `tidemill serve` over a file: what they set, and what they leave as the file has it."""

from pathlib import Path
from typing import cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.serve import help_of, settled
from tidemill.cluster.config.flags import FLAGS, ROLES
from tidemill.cluster.config.overrides import Given, overridden
from tidemill.cluster.config.paths import keys
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.tree import ModelConfig, RootConfig

BY_OPTION = {flag.option: flag for flag in FLAGS}
VALUES = {
    "--host": "a",
    "--port": 1,
    "--store": "/a",
    "--log-json": True,
    "--ttft-max": 5.0,
    "--routers": 7,
    "--page-size": 7,
    "--overlap": False,
    "--memory": "7MiB",
    "--threads": 7,
    "--device": "cuda:7",
    "--tensor-parallel-size": 7,
}
"""Of flags that go with every configuration."""


def said(*words: str) -> RootConfig:
    return settled(cli.parser().parse_args(["serve", *words]))


def shape(model: ModelConfig) -> list[tuple[str, int]]:
    return [(group.role, group.replicas) for group in model.groups]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@given(TREES, st.dictionaries(st.sampled_from(sorted(VALUES)), st.none(), max_size=4))
def test_flags_have_the_last_word_and_leave_the_rest(tree: Tree, options: dict[str, None]) -> None:
    chosen = [Given(BY_OPTION[option], VALUES[option]) for option in options]
    before = yaml.safe_dump(tree)
    merged, flags = overridden(tree, None, chosen)
    assert yaml.safe_dump(tree) == before, "the file's tree is not written to"
    was, now = RootConfig.model_validate(tree), RootConfig.model_validate(merged)
    leaves = _leaves(was.model_dump())
    for path, value in _leaves(now.model_dump()).items():
        assert value == (VALUES[flags[path]] if path in flags else leaves[path])
    for one in chosen:
        count = {"model": len(now.models), "engine": len(now.models)}
        count["group"] = sum(len(model.groups) for model in now.models)
        assert list(flags.values()).count(one.flag.option) == count.get(one.flag.scope, 1)


def _leaves(node: object, place: tuple[int | str, ...] = ()) -> dict[tuple[int | str, ...], object]:
    if isinstance(node, dict):
        items = list(cast("dict[int | str, object]", node).items())
    elif isinstance(node, tuple):
        items = list(enumerate(cast("tuple[object, ...]", node)))
    else:
        return {place: node}
    return {at: leaf for key, value in items for at, leaf in _leaves(value, (*place, key)).items()}


def test_without_a_file_there_are_the_defaults() -> None:
    config = said("keeper", "--prefill", "2", "--memory", "64MiB", "--api-key", "sk-1")
    assert config == RootConfig.model_validate(
        {
            "models": [
                {
                    "model": "keeper",
                    "groups": [
                        {"role": "prefill", "replicas": 2, "memory": "64MiB"},
                        {"role": "decode", "memory": "64MiB"},
                    ],
                }
            ]
        }
    )
    assert said("keeper") == RootConfig.model_validate({"models": [{"model": "keeper"}]})


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (["--mixed", "3"], [("mixed", 3)]),
        (["--decode", "3"], [("prefill", 1), ("decode", 3)]),
        (["--decode", "3", "--prefill", "2"], [("prefill", 2), ("decode", 3)]),
    ],
)
def test_groups_by_flags(words: list[str], groups: list[tuple[str, int]]) -> None:
    assert shape(said("keeper", *words).models[0]) == groups


def test_flags_of_a_role_go_before_those_of_all() -> None:
    config = said(
        "keeper", "--prefill-tensor-parallel-size", "4", "-tp", "2", "--decode-max", "9", "--decode", "3"
    )
    prefill, decode = config.models[0].groups
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (4, 2)
    assert (prefill.replicas_max, decode.replicas_max) == (None, 9)


def test_a_file_and_flags(file: Path) -> None:
    file.write_text("""
        models:
        - model: keeper
          served_model_name: one
          ttft_max: 5
          groups:
          - {role: prefill, replicas: 2, memory: 64MiB}
          - {role: decode, replicas: 3, memory: 32MiB, threads: 2}
        - model: keeper
          served_model_name: two
          groups: [{role: mixed}]
        edge: {port: 9000, grpc_port: 9001}
        telemetry: {log_json: true}
    """)
    config = said("--config", str(file), "--port", "0", "--decode", "4", "--memory", "16MiB", "--no-log-json")
    one, two = config.models
    assert (config.edge.port, config.edge.grpc_port) == (0, 9001)
    assert not config.telemetry.log_json
    assert shape(one) == [("prefill", 2), ("decode", 4)], "the model that has such a group"
    assert shape(two) == [("mixed", 1)]
    assert {group.memory for model in config.models for group in model.groups} == {"16MiB"}
    assert (one.ttft_max, one.groups[1].threads) == (5, 2)


def test_mixed_workers_take_the_place_of_both(file: Path) -> None:
    """They are like decode workers of the file; a model that has mixed ones keeps its own."""
    file.write_text("""
        models:
        - model: keeper
          served_model_name: one
          groups:
          - {role: prefill, replicas: 2, memory: 64MiB}
          - {role: decode, replicas: 3, replicas_max: 4, memory: 32MiB, threads: 2}
          - {role: decode, memory: 8MiB}
        - model: keeper
          served_model_name: two
          groups: [{role: mixed, memory: 1MiB}]
    """)
    one, two = said("--config", str(file), "--mixed", "5").models
    assert (shape(one), shape(two)) == ([("mixed", 5)], [("mixed", 5)])
    (group,) = one.groups
    assert (group.memory, group.threads, group.replicas_max) == ("32MiB", 2, None)
    assert two.groups[0].memory == "1MiB"
    file.write_text("models: [{model: keeper, groups: [{role: prefill}, {role: decode}]}]")
    with pytest.raises(ConfigError, match="mixed workers"):
        said("--config", str(file), "--mixed", "5", "--decode", "2")


def test_a_model_is_named_in_one_place(file: Path) -> None:
    file.write_text("models: [{model: keeper, routers: 3}]")
    (model,) = said("another", "--config", str(file), "--served-model-name", "a", "b").models
    assert (model.model, model.names, model.routers) == ("another", ("a", "b"), 3)
    file.write_text("edge: {port: 1}")
    assert said("keeper", "--config", str(file)).edge.port == 1

    file.write_text("models: [{model: a}, {model: b}]")
    for words in (["keeper"], ["--served-model-name", "a"]):
        with pytest.raises(ConfigError, match="names one model, and"):
            said(*words, "--config", str(file))
    for words in ([], ["--decode", "2"]):
        with pytest.raises(ConfigError, match="name a model"):
            said(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prefill", "0"], "--prefill is 0: set it to 1 or more"),
        (["--threads", "0"], "--threads is 0"),
        (["--memory", "much"], "--memory: size 'much' is not a number of bytes"),
        (["--mixed", "1", "--prefill", "1"], "--prefill: mixed workers"),
        (["--mixed", "1", "--prefill-max", "4"], "--prefill-max is of prefill workers, and there are none"),
        (["--decode", "3", "--decode-max", "2"], "--decode-max is 2: set it to replicas, 3, or more"),
        (["--port", "70000"], "--port is 70000"),
    ],
)
def test_what_a_flag_has_set_is_called_by_its_name(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        said("keeper", *words)
    assert says in str(raised.value)


def test_two_groups_of_a_role_are_counted_in_the_file(file: Path) -> None:
    file.write_text("models: [{model: a, groups: [{role: mixed}, {role: mixed, threads: 2}]}]")
    with pytest.raises(ConfigError, match=r"--mixed is of one group, and there are groups\[0\], groups\[1\]"):
        said("--config", str(file), "--mixed", "2")
    (model,) = said("--config", str(file), "--mixed-max", "2").models
    assert [group.replicas_max for group in model.groups] == [2, None]


@pytest.mark.parametrize(
    "text", ["[]", "models: 1", "models: [1]", "models: [{model: a, groups: 1}]", "edge: 1"]
)
def test_a_file_that_is_no_tree_is_refused_with_flags_as_without(file: Path, text: str) -> None:
    file.write_text(text)
    model = ["keeper"] if text == "edge: 1" else []
    for more in ("--port=1", "--decode=2", "-tp=2", "--page-size=1", "--routers=1", "--log-json"):
        with pytest.raises(ConfigError, match=str(file)):
            said(*model, "--config", str(file), more)


def test_every_flag_is_explained_and_tells_the_default_of_its_key() -> None:
    assert all(help_of(flag) for flag in FLAGS)
    assert help_of(BY_OPTION["--port"]).endswith("(8000)")
    assert help_of(BY_OPTION["--memory"]).endswith("(1GiB)")
    assert help_of(BY_OPTION["--ttft-max"]).endswith("(60)")
    assert "%" not in "".join(map(help_of, FLAGS)), "argparse would take it for its own"


def test_keys_without_a_flag_are_a_decision() -> None:
    flagged = {flag.explained.path for flag in FLAGS}
    assert {key.path for key in keys() if not key.is_node} - flagged == {
        "models[].model",  # MODEL
        "models[].autoscaling.downscale_delay_s",
        "models[].autoscaling.metrics_interval_s",
        "models[].autoscaling.upscale_delay_s",
        "models[].groups[].labels",
        "models[].groups[].num_cpus",
        "models[].groups[].num_gpus",
        "models[].groups[].resources",
        "models[].groups[].role",
        "cluster.namespace",
    }
    assert {flag.scope for flag in FLAGS} > set(ROLES)
