"""A valid configuration file round-trips; errors have the location and the fix; its schema is current."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from tools.cli_reference import reference as cli_reference

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.config.compatibility import FEATURES, refusal
from tidemill.cluster.config.compatibility import page as compatibility
from tidemill.cluster.config.flags import FLAGS
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.reading import dump, parse_config, read_config
from tidemill.cluster.config.reference import INTRODUCTION, reference, schema
from tidemill.cluster.config.tree import EdgeConfig, RootConfig


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse_config(text, "c.yaml")
    assert "\n" not in str(raised.value)
    assert "c.yaml" in str(raised.value)
    return raised.value.problems


def mappings(node: Any, location: str = "") -> list[tuple[str, dict[str, Any]]]:  # noqa: ANN401 - YAML
    """Return the mappings of a tree with fixed keys, each with its location."""
    if isinstance(node, list):
        entries = [(f"{location}[{index}]", entry) for index, entry in enumerate(cast("list[Any]", node))]
    elif isinstance(node, dict) and not location.endswith(("resources", "labels")):
        items = cast("dict[str, Any]", node).items()
        entries = [(f"{location}.{key}".removeprefix("."), value) for key, value in items]
    else:
        return []
    below = [found for at, entry in entries for found in mappings(entry, at)]
    return [(location, cast("dict[str, Any]", node)), *below] if isinstance(node, dict) else below


@given(TREES)
def test_valid_file_round_trips(tree: Tree) -> None:
    config = parse_config(yaml.safe_dump(tree), "c.yaml")
    assert parse_config(dump(config), "c.yaml") == config
    assert RootConfig.model_validate(tree) == config


@given(TREES, st.data())
def test_unknown_key_is_named_with_its_location(tree: Tree, data: st.DataObject) -> None:
    location, node = data.draw(st.sampled_from(mappings(tree)))
    node["sk_planted"] = "sk-secret"
    (problem,) = problems(yaml.safe_dump(tree))
    assert problem.startswith(f"{location}.sk_planted: there is no such key here".removeprefix("."))
    assert "sk-secret" not in problem, "it may be a secret"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["models", "model", "groups", "role", "edge", "port", "memory"])
                | st.integers(),
                inner,
            )
        ),
    )
)
def test_malformed_tree_is_refused_with_problems(tree: object) -> None:
    try:
        parse_config(yaml.safe_dump(tree), "c.yaml")
    except ConfigError as error:
        lines = error.problems
    else:
        lines = ("by chance the tree is valid",)
    assert all(lines)


@given(st.text(max_size=40))
def test_arbitrary_text_is_refused(text: str) -> None:
    problems(text)


MODEL = "models: [{model: keeper}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models is required"),
        ("- models", "write the keys as `name: value` lines"),
        ("models: [1GiB", "is not YAML"),
        ("[" * 5000, "too deep"),
        ("models: []", "models is empty"),
        ("models: keeper", "models is 'keeper': it takes a list"),
        ("models: [keeper]", "models[0] is 'keeper': it takes `name: value` lines"),
        ("models: [{memory: 1GiB}]", "models[0].model is required"),
        ("models: [{model: keeper}, {model: keeper}]", "models: two models are called keeper"),
        ("models: [{model: a}, {model: b, served_model_name: [c, a]}]", "two models are called a"),
        ("models: [{model: a/b}, {model: a-b}]", "two models are called a-b"),
        (
            "models: [{model: keeper, groups: [{role: cook}]}]",
            "models[0].groups[0].role is 'cook': set it to",
        ),
        ("models: [{model: a, groups: [{role: mixed}, {role: decode}]}]", "models[0].groups: mixed workers"),
        ("models: [{model: a, groups: [{role: decode}]}]", "there is no prefill worker"),
        ("models: [{model: a, groups: []}]", "models[0].groups is empty"),
        (
            "models: [{model: a, groups: [{role: mixed, replicas: 3, replicas_max: 2}]}]",
            "models[0].groups[0].replicas_max is 2: set it to replicas, 3, or more",
        ),
        (
            "models: [{model: a, groups: [{role: mixed}, {role: mixed, replicas_max: 2}]}]",
            "only the first mixed group can grow",
        ),
        ("models: [{model: a, groups: [{role: mixed, num_gpus: 1.5}]}]", "groups[0].num_gpus is 1.5: Ray"),
        (
            "models: [{model: a, groups: [{role: mixed, device: tpu}]}]",
            "device is 'tpu': set it to cpu, cuda",
        ),
        ("models: [{model: a, groups: [{role: mixed, memory: much}]}]", "write it like 512MiB"),
        ("models: [{model: a, groups: [{role: mixed, memory: true}]}]", "memory is True: it takes text"),
        ("models: [{model: a, groups: [{role: mixed, labels: {1: a}}]}]", "labels[1]: write names of keys"),
        ("models: [{model: a, ttft_max: .nan}]", "models[0].ttft_max is nan: it takes a number"),
        ("models: [{model: a, routers: 1.5}]", "models[0].routers is 1.5: it takes a whole number"),
        ("models: [{model: a, engine: {overlap: 1}}]", "overlap is 1: it takes true or false"),
        ("models: [{model: a, engine: {num_speculative_tokens: 17}}]", "is 17: set it to 16 or less"),
        ("models: [{model: a, autoscaling: {upscale_delay_s: 1}}]", "models[0].autoscaling: set metrics_"),
        (f"{MODEL}\nedge: {{port: 65536}}", "edge.port is 65536: set it to 65535 or less"),
        (f"{MODEL}\nedge: {{port: {{a: 1}}}}", "edge.port: this takes a whole number"),
        (f"{MODEL}\nedge:", "edge is None: it takes `name: value` lines below it, or leave it out"),
        (f"{MODEL}\nedge: {{ssl_ca_certs: a}}", "edge: HTTPS takes"),
        (f"{MODEL}\ncluster: {{host: node}}", "cluster: host node lets"),
        (f"{MODEL}\ncluster: {{ssl_keyfile: a}}", "cluster: ssl_certfile is missing"),
        (f"{MODEL}\n{MODEL}", "models is given twice"),
        (f"{MODEL}\n1: 2", "write names of keys as text"),
    ],
)
def test_error_names_mistake(text: str, message: str) -> None:
    assert message in problems(text)[0]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("modles: 1", "did you mean models?"),
        ("edge: {prot: 1}", "edge.prot: there is no such key here: did you mean port?"),
        ("port: 1", "did you mean edge.port?"),
        ("max-model-len: 1", "did you mean models[].max_model_len?"),
        ("memory: 1GiB", "did you mean models[].groups[].memory?"),
        ("prefill: 1", "did you mean models[].groups[]?"),
        ("cluster_host: node", "did you mean cluster.host?"),
        ("zzz: 1", "the keys here are cluster, edge, models, store, telemetry"),
        ("edge: {api_key: sk-1}", "edge.api_key: this file takes no secret in clear: edge.api_keys_file"),
        ("store: {secret: sk-1}", "store.secret_file"),
    ],
)
def test_unknown_key_is_answered_with_suggestion(key: str, message: str) -> None:
    (problem,) = problems(f"{MODEL}\n{key}")
    assert message in problem
    assert "sk-1" not in problem


def test_error_lists_all_problems_and_shows_first_in_one_line() -> None:
    text = "models: [{model: a, routers: 0, groups: [{role: mixed, threads: 0}]}]\nedge: {port: -1}"
    assert problems(text) == (
        "models[0].routers is 0: set it to 1 or more",
        "models[0].groups[0].threads is 0: set it to 1 or more",
        "edge.port is -1: set it to 0 or more",
    )
    with pytest.raises(ConfigError, match=r"2 more: tidemill config check c\.yaml"):
        parse_config(text, "c.yaml")


def test_errors_stay_short_for_exponential_aliases() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)]
    answers = problems("\n".join([*lines, "models: *a29"]))
    assert sum(map(len, answers)) < 10_000


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"models: \xff")
    for path, message in (
        (tmp_path, "cannot be read"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "latin", "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            read_config(path)
        assert str(path) in str(raised.value)


ROOT = Path(__file__).parents[4]


SCHEMA = schema()


def is_valid(tree: Any) -> bool:  # noqa: ANN401 - as YAML has it
    return Draft202012Validator(SCHEMA).is_valid(tree)


def test_page_and_schema_are_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == reference(), "run `make config-doc`"
    assert (ROOT / "docs/cli.md").read_text() == cli_reference(), "run `make config-doc`"
    assert (ROOT / "docs/compatibility.md").read_text() == compatibility(), "run `make config-doc`"
    assert json.loads((ROOT / "deploy/config.schema.json").read_text()) == schema(), "run `make config-doc`"


def test_compatibility_asks_the_settings() -> None:
    assert refusal({"--mixed": 1}) is None
    assert refusal({"--mixed": 1, "--prefill": 1}) is not None
    assert str(refusal({"--kernels": "cpu", "--device": "cuda"})).startswith("--kernels cpu computes in host")
    assert {option for feature in FEATURES for option in feature} <= {flag.option for flag in FLAGS}


@given(TREES)
@settings(max_examples=20)  # this validator is slow
def test_schema_accepts_valid_files(tree: Tree) -> None:
    assert is_valid(tree)
    assert is_valid(yaml.safe_load(dump(parse_config(yaml.safe_dump(tree), "c.yaml"))))


def test_schema_is_valid_and_refuses_invalid_files() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for text in (
        "edge: {port: 1}",
        "models: [{model: keeper, zzz: 1}]",
        "models: [{model: keeper, groups: [{role: cook}]}]",
        "models: [{model: keeper, groups: [{role: mixed, memory: much}]}]",
        "models: [{model: keeper, groups: [{role: mixed, device: tpu}]}]",
        "models: [{model: keeper}]\nedge: {port: 65536}",
    ):
        assert not is_valid(yaml.safe_load(text))


def test_example_files_are_valid() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", INTRODUCTION, re.DOTALL)
    assert len(parse_config(example, "example").models) == 2
    assert read_config(ROOT / "deploy" / "job.yaml").cluster.ray_address == "auto"
    for page in ("README.md", "docs/quickstart.md"):
        for text in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            parse_config(text, page)


@pytest.mark.parametrize("origins", [["https://a", "https://b"], ['["https://a", "https://b"]']])
def test_origins_are_a_list_of_words_or_of_json(origins: list[str]) -> None:
    """The flag of vLLM takes JSON."""
    edge = EdgeConfig.model_validate({"allowed_origins": origins})
    assert edge.allowed_origins == ("https://a", "https://b")
    with pytest.raises(ValidationError):
        EdgeConfig.model_validate({"allowed_origins": ["[7"]})
