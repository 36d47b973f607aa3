"""Options from files: as if they had been written on the command line, and one line for each mistake."""

import argparse
from pathlib import Path

import pytest

from tidemill.cluster import cli
from tidemill.cluster.cli_files import UsageError, with_config
from tidemill.cluster.cli_serve import cluster_settings, summary
from tidemill.cluster.settings import ClusterSettings


def parsed(*arguments: str) -> argparse.Namespace:
    return cli.parser().parse_args(["serve", *arguments])


def configured(file: Path, text: str, *arguments: str) -> argparse.Namespace:
    file.write_text(text)
    command = ["serve", *arguments, "--config", str(file)]
    options = cli.parser().parse_args(command)
    return cli.parser().parse_args(with_config(command, options, options.options))


def settings(*arguments: str) -> ClusterSettings:
    return cluster_settings(parsed(*arguments), "memory:", Path("cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def test_a_config_file_stands_before_the_command_line(file: Path) -> None:
    text = """
        model: keeper
        port: 9000
        memory: 64MiB
        decode: 2
        overlap: false
        enforce-eager: true
        memory-broker: true
        served-model-name: [one, two]
        api-key: [a, b]
    """
    options = configured(file, text, "--port", "0", "--api-key", "c")
    assert options.port == 0, "the command line has the last word"
    assert (options.model, options.memory, options.decode) == ("keeper", "64MiB", 2)
    assert (options.overlap, options.enforce_eager, options.memory_broker) == (False, True, True)
    assert options.served_model_name == ["one", "two"]
    assert options.api_key == ["a", "b", "c"]
    assert configured(file, text, "another").model == "another"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memroy: 1GiB", "did you mean memory?"),
        ("zzz: 1", "no option 'zzz'"),
        ("config: other.yaml", "no option 'config'"),
        ("- memory", "name: value"),
        ("memory: {size: 1}", "no value"),
        ("memory: [1GiB", "YAML"),
    ],
)
def test_mistakes_in_a_config_file_are_named(file: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        configured(file, text, "keeper")
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_models_have_fleets_of_their_own(file: Path) -> None:
    file.write_text("""
        models:
        - model: keeper
          served-model-name: [Org/Large, large]
          decode: 2
          ttft-max: 5
        - model: keeper
          served-model-name: small
          mixed: 1
          memory: 16MiB
    """)
    served = settings("--model-config", str(file), "--memory", "64MiB", "--max-num-seqs", "8")
    large, small = served.fleets
    assert (large.names, small.names) == (("Org/Large", "large"), ("small",))
    assert [worker.name for worker in served.workers] == [
        "org-large-prefill-0",
        "org-large-decode-0",
        "org-large-decode-1",
        "small-mixed-0",
    ]
    assert large.router.expected == {worker.name for worker in large.workers}
    assert (large.router.name, small.router.name) == ("org-large-router", "small-router")
    assert (large.router.ttft_s_max, small.router.ttft_s_max) == (5, 60)
    engines = [worker.engine for worker in served.workers]
    assert [one.memory_bytes >> 20 for one in engines] == [64, 64, 64, 16]
    assert {one.rows_max for one in engines} == {8}, "what the command line says counts for all"
    said = summary(parsed("--model-config", str(file)))
    assert said == "Org/Large, large with 1 prefill + 2 decode; small with 1 mixed"


def test_one_model_has_plain_names() -> None:
    (fleet,) = settings("keeper", "--served-model-name", "a", "b").fleets
    assert fleet.names == ("a", "b")
    assert [worker.name for worker in fleet.workers] == ["prefill-0", "decode-0"]
    assert fleet.router.name == "router"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: []", "1 to 64 entries"),
        ("model: keeper", "1 to 64 entries"),
        ("models: [keeper]", "name: value"),
        ("models: [{memory: 1GiB}]", "`model:` is missing"),
        ("models: [{model: keeper, port: 1}]", "no option 'port'"),
        ("models: [{model: keeper, decode: two}]", "decode"),
        ("models: [{model: keeper}, {model: keeper}]", "two models are called keeper"),
        ("models: [{model: a}, {model: b, served-model-name: [c, a]}]", "two models are called a"),
        ("models: [{model: a/b}, {model: a-b}]", "two models are called a-b"),
        ("models: [{model: keeper, mixed: 1, decode: 1}]", "--mixed"),
    ],
)
def test_mistakes_in_a_model_file_are_named(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        settings("--model-config", str(file))


def test_a_model_is_named_in_one_place(file: Path) -> None:
    file.write_text("models: [{model: keeper}]")
    for arguments in (["keeper"], ["--served-model-name", "a"]):
        with pytest.raises(UsageError, match="leave MODEL"):
            settings(*arguments, "--model-config", str(file))
    with pytest.raises(UsageError, match="name a model"):
        settings()
