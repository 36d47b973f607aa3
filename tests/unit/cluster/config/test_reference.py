"""The published schema and docs/configuration.md are current and match the code."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from tools.cli_reference import reference as cli_reference

from tests.support.cluster.configs import TREES, Tree
from tidemill.cluster.config.compatibility import FEATURES, refusal
from tidemill.cluster.config.compatibility import page as compatibility
from tidemill.cluster.config.flags import FLAGS
from tidemill.cluster.config.reading import dump, parse_config, read_config
from tidemill.cluster.config.reference import INTRODUCTION, reference, schema

ROOT = Path(__file__).parents[4]


SCHEMA = schema()


def is_valid(tree: Any) -> bool:  # noqa: ANN401 - as YAML has it
    return Draft202012Validator(SCHEMA).is_valid(tree)  # pyright: ignore[reportUnknownMemberType] - half typed


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
