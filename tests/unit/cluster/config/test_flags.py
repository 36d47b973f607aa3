"""Flags of `tidemill serve` set their keys and leave the rest of the file."""

from pathlib import Path
from typing import cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.serve import config_of_options, help_of
from tidemill.cluster.config.flags import FLAGS
from tidemill.cluster.config.overrides import GivenFlag, apply_flags
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.tree import ModelConfig, RootConfig

BY_OPTION = {flag.option: flag for flag in FLAGS}
VALUES = {
    "--host": "a",
    "--store": "/a",
    "--log-json": True,
    "--ttft-max": 5.0,
    "--overlap": False,
    "--memory": "7MiB",
    "--itl-target": 0.05,
    "--device": "cuda",
    **dict.fromkeys(("--port", "--routers", "--page-size", "--threads"), 7),
    **dict.fromkeys(("--tensor-parallel-size", "--tensor-parallel-nodes"), 7),
}
"""Values of flags that every configuration accepts."""


def parse(*words: str) -> RootConfig:
    return config_of_options(cli.parser().parse_args(["serve", *words]))


def shape(model: ModelConfig) -> list[tuple[str, int]]:
    return [(group.role, group.replicas) for group in model.groups]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@given(TREES, st.dictionaries(st.sampled_from(sorted(VALUES)), st.none(), max_size=4))
def test_flags_override_file_and_leave_other_keys(tree: Tree, options: dict[str, None]) -> None:
    chosen = [GivenFlag(BY_OPTION[option], VALUES[option]) for option in options]
    before = yaml.safe_dump(tree)
    merged, flags = apply_flags(tree, None, chosen)
    assert yaml.safe_dump(tree) == before, "the file's tree is unchanged"
    was, now = RootConfig.model_validate(tree), RootConfig.model_validate(merged)
    leaves = _leaves(was.model_dump())
    for path, value in _leaves(now.model_dump()).items():
        assert value == (VALUES[flags[path]] if path in flags else leaves[path])
    for entry in chosen:
        count = {"model": len(now.models), "engine": len(now.models)}
        count["group"] = sum(len(model.groups) for model in now.models)
        assert list(flags.values()).count(entry.flag.option) == count.get(entry.flag.scope, 1)


def _leaves(node: object, location: tuple[int | str, ...] = ()) -> dict[tuple[int | str, ...], object]:
    if isinstance(node, dict):
        items = list(cast("dict[int | str, object]", node).items())
    elif isinstance(node, tuple):
        items = list(enumerate(cast("tuple[object, ...]", node)))
    else:
        return {location: node}
    return {at: leaf for key, value in items for at, leaf in _leaves(value, (*location, key)).items()}


def test_flags_without_file_use_defaults() -> None:
    config = parse("keeper", "--prefill", "2", "--memory", "64MiB", "--api-key", "sk-1")
    groups = [
        {"role": "prefill", "replicas": 2, "memory": "64MiB"},
        {"role": "decode", "memory": "64MiB"},
    ]
    assert config == RootConfig.model_validate({"models": [{"model": "keeper", "groups": groups}]})
    assert parse("keeper") == RootConfig.model_validate({"models": [{"model": "keeper"}]})


def test_flags_add_groups_and_those_of_a_role_override_those_of_all() -> None:
    for words, groups in (
        (["--mixed", "3"], [("mixed", 3)]),
        (["--decode", "3"], [("prefill", 1), ("decode", 3)]),
        (["--decode", "3", "--prefill", "2"], [("prefill", 2), ("decode", 3)]),
    ):
        assert shape(parse("keeper", *words).models[0]) == groups
    words = ["--prefill-tensor-parallel-size", "4", "-tp", "2", "--decode-max", "9", "--decode", "3"]
    prefill, decode = parse("keeper", *words).models[0].groups
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (4, 2)
    assert (prefill.replicas_max, decode.replicas_max) == (None, 9)


TWO = """
    models:
    - {model: keeper, served_model_name: one, ttft_max: 5, groups: [
        {role: prefill, replicas: 2, memory: 64MiB},
        {role: decode, replicas: 3, replicas_max: 4, memory: 32MiB, threads: 2}]}
    - {model: keeper, served_model_name: two, groups: [{role: mixed, memory: 1MiB}]}
    edge: {port: 9000, grpc_port: 9001}
    telemetry: {log_json: true}
"""


def test_flags_apply_to_all_models_of_file(file: Path) -> None:
    file.write_text(TWO)
    words = ("--port", "0", "--decode", "4", "--memory", "16MiB", "--no-log-json")
    config = parse("--config", str(file), *words)
    first, second = config.models
    assert (config.edge.port, config.edge.grpc_port) == (0, 9001)
    assert not config.telemetry.log_json
    assert shape(first) == [("prefill", 2), ("decode", 4)], "the model with a decode group"
    assert shape(second) == [("mixed", 1)]
    assert {group.memory for model in config.models for group in model.groups} == {"16MiB"}
    assert (first.ttft_max, first.groups[1].threads) == (5, 2)


def test_mixed_flag_replaces_prefill_and_decode_groups(file: Path) -> None:
    """Mixed workers copy the decode workers of the file; a model with mixed workers keeps its own."""
    file.write_text(TWO)
    first, second = parse("--config", str(file), "--mixed", "5").models
    assert shape(first) == shape(second) == [("mixed", 5)]
    (group,) = first.groups
    assert (group.memory, group.threads, group.replicas_max) == ("32MiB", 2, None)
    assert second.groups[0].memory == "1MiB"
    file.write_text("models: [{model: keeper, groups: [{role: prefill}, {role: decode}]}]")
    with pytest.raises(ConfigError, match="mixed workers"):
        parse("--config", str(file), "--mixed", "5", "--decode", "2")


def test_model_argument_needs_single_model(file: Path) -> None:
    file.write_text("models: [{model: keeper, routers: 3}]")
    (model,) = parse("another", "--config", str(file), "--served-model-name", "a", "b").models
    assert (model.model, model.names, model.routers) == ("another", ("a", "b"), 3)
    file.write_text("edge: {port: 1}")
    assert parse("keeper", "--config", str(file)).edge.port == 1

    file.write_text("models: [{model: a}, {model: b}]")
    for words in (["keeper"], ["--served-model-name", "a"]):
        with pytest.raises(ConfigError, match="names one model, and"):
            parse(*words, "--config", str(file))
    for words in ([], ["--decode", "2"]):
        with pytest.raises(ConfigError, match="name a model"):
            parse(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "0"], "--prefill is 0: set it to 1 or more"),
        (["--threads", "0"], "--threads is 0"),
        (["--memory", "much"], "--memory: size 'much' is not a number of bytes"),
        (["--mixed", "1", "--prefill", "1"], "--prefill: mixed workers"),
        (["--mixed", "1", "--prefill-max", "4"], "--prefill-max sets prefill workers, and there are none"),
        (["--decode", "3", "--decode-max", "2"], "--decode-max is 2: set it to replicas, 3, or more"),
        (["--port", "70000"], "--port is 70000"),
    ],
)
def test_error_names_flag_that_set_value(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse("keeper", *words)
    assert message in str(raised.value)


def test_count_flag_is_refused_for_two_groups_of_role(file: Path) -> None:
    file.write_text("models: [{model: a, groups: [{role: mixed}, {role: mixed, threads: 2}]}]")
    with pytest.raises(ConfigError, match=r"--mixed sets one group, and there are groups\[0\], groups\[1\]"):
        parse("--config", str(file), "--mixed", "2")
    (model,) = parse("--config", str(file), "--mixed-max", "2").models
    assert [group.replicas_max for group in model.groups] == [2, None]


@pytest.mark.parametrize(
    "text", ["[]", "models: 1", "models: [1]", "models: [{model: a, groups: 1}]", "edge: 1"]
)
def test_flags_leave_errors_of_malformed_file(file: Path, text: str) -> None:
    file.write_text(text)
    model = ["keeper"] if text == "edge: 1" else []
    for more in ("--port=1", "--decode=2", "-tp=2", "--page-size=1", "--routers=1", "--log-json"):
        with pytest.raises(ConfigError, match=str(file)):
            parse(*model, "--config", str(file), more)


def test_kv_events_are_configured_as_in_vllm() -> None:
    given = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    events = parse("keeper", "--kv-events-config", given).telemetry.kv_events
    assert (events.enable_kv_cache_events, events.endpoint, events.topic) == (True, "tcp://*:5557", "kv")
    assert events.buffer_steps == 10_000
    for wrong, problem in (
        ("{", r"^--kv-events-config is not a JSON object .*write it like \{"),
        ("7", "^--kv-events-config is 7: it takes"),
        ('{"endpoint": "5557"}', r"kv_events\.endpoint is '5557': write it like tcp://"),
        ('{"endpoint": "tcp://*"}', r"kv_events\.endpoint is 'tcp://\*': write it like tcp://"),
        ('{"publisher": "kafka"}', r"kv_events\.publisher is 'kafka': set it to 'null' or 'zmq'"),
        ('{"end_point": "x"}', r"did you mean endpoint\?"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse("keeper", "--kv-events-config", wrong)


def test_every_flag_has_help_with_default() -> None:
    assert all(help_of(flag) for flag in FLAGS)
    assert help_of(BY_OPTION["--port"]).endswith("(8000)")
    assert "(1GiB; on CUDA what" in help_of(BY_OPTION["--memory"])
    assert help_of(BY_OPTION["--ttft-max"]).endswith("(no limit)")
    assert "%" not in "".join(map(help_of, FLAGS)), "argparse would format it"
