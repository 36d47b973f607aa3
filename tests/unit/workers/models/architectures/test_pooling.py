"""The head of a model that pools, by its folder and by --runner and --convert, and refusals by name."""

import json
from pathlib import Path

import pytest

from tidemill.workers.messages import Pooling
from tidemill.workers.models.architectures.config import HEAD, ArchitectureConfig
from tidemill.workers.models.architectures.pooling import SCORE, converted
from tidemill.workers.models.errors import ModelError
from tidemill.workers.options import Convert, Purpose, Runner

CONFIG = ArchitectureConfig(layers=(), vocab_size=97, hidden=48, epsilon=1e-6, tied=False, max_length=64)
GENERATES, CLASSIFIES = "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"
LAST_TOKEN: dict[str, object] = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def decided(
    folder: Path,
    name: str,
    runner: Runner = "auto",
    convert: Convert = "auto",
    **raw: object,
) -> tuple[ArchitectureConfig, Pooling | None]:
    return converted(folder, {"architectures": [name], **raw}, CONFIG, Purpose(runner, convert))


def with_modules(folder: Path, pooling: dict[str, object], *more: str) -> Path:
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": ""} for name in ("Transformer", *more)
    ]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_models_that_generate_keep_their_head(tmp_path: Path) -> None:
    asked = [Purpose(), Purpose("auto", "none"), Purpose("generate"), Purpose("generate", "none")]
    for purpose in asked:
        assert decided(tmp_path, GENERATES, *purpose) == (CONFIG, None)
    with_modules(tmp_path, LAST_TOKEN)
    assert decided(tmp_path, GENERATES, "generate") == (CONFIG, None)


@pytest.mark.parametrize("pooling", [LAST_TOKEN, {"pooling_mode": "lasttoken", "include_prompt": True}])
def test_folders_of_sentence_transformers_embed(tmp_path: Path, pooling: dict[str, object]) -> None:
    config, found = decided(with_modules(tmp_path, pooling), GENERATES)
    assert (config.head, config.labels) == ("", ())
    assert found == Pooling(kind="embed", size=48, normalize=False)


def test_normalised_if_there_is_a_module_for_it(tmp_path: Path) -> None:
    assert decided(with_modules(tmp_path, LAST_TOKEN, "Normalize"), "Qwen3Model")[1] == Pooling(
        kind="embed", size=48
    )


@pytest.mark.parametrize(
    ("raw", "dimensions"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [8, 16]}, (8, 16))],
)
def test_dimensions_of_config_json(
    tmp_path: Path, raw: dict[str, object], dimensions: tuple[int, ...] | None
) -> None:
    for purpose in (Purpose("pooling"), Purpose("auto", "embed"), Purpose("pooling", "embed")):
        _, found = decided(tmp_path, GENERATES, *purpose, **raw)
        assert found == Pooling(kind="embed", size=48, dimensions=dimensions)


def test_classifiers_rank_by_their_label_and_embed_on_demand(tmp_path: Path) -> None:
    config, found = decided(tmp_path, CLASSIFIES, id2label={"0": "LABEL_0"})
    assert (config.head, config.labels) == (SCORE, (0,))
    assert found == Pooling(kind="classify", size=1)
    assert decided(tmp_path, CLASSIFIES, convert="embed")[1] == Pooling(kind="embed", size=48)


def test_answers_are_rows_of_the_head(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 3, "no": 9}}}))
    config, found = decided(tmp_path, GENERATES, convert="classify")
    assert (config.head, config.labels) == (HEAD, (9, 3))
    assert found == Pooling(kind="classify", size=2)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 3}}}))
    with pytest.raises(ModelError, match="no tokens no and yes"):
        decided(tmp_path, GENERATES, convert="classify")


@pytest.mark.parametrize(
    ("name", "runner", "convert", "raw", "message"),
    [
        (CLASSIFIES, "auto", "auto", {}, "has 2 labels"),
        (CLASSIFIES, "generate", "auto", {"num_labels": 1}, "leave out --runner generate"),
        (GENERATES, "generate", "embed", {}, "set --runner to pooling"),
        (GENERATES, "pooling", "none", {}, "set --convert to embed or classify"),
        (GENERATES, "pooling", "auto", {"matryoshka_dimensions": [8, 99]}, "1 to 48"),
        (GENERATES, "pooling", "auto", {"matryoshka_dimensions": "8"}, "1 to 48"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, name: str, runner: Runner, convert: Convert, raw: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        decided(tmp_path, name, runner, convert, **raw)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ({"pooling_mode_mean_tokens": True}, (), "pools by mean_tokens: only lasttoken"),
        ({"pooling_mode": "cls"}, (), "pools by cls"),
        ({}, (), "pools by nothing"),
        ({**LAST_TOKEN, "pooling_mode_max_tokens": True}, (), "lasttoken and max_tokens"),
        (LAST_TOKEN, ("Dense",), "the module Dense"),
    ],
)
def test_other_pooling_is_refused_by_name(
    tmp_path: Path, pooling: dict[str, object], more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        decided(with_modules(tmp_path, pooling, *more), GENERATES)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"type": 1}]', "null"])
def test_broken_modules_are_an_error_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json cannot be used"):
        decided(tmp_path, GENERATES)
