"""Decide what a model pools, and with which head: by its folder, and by --runner and --convert."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tidemill.workers.messages import Pooling
from tidemill.workers.models.architectures.config import HEAD, ArchitectureConfig
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.config_json import Raw, require
from tidemill.workers.models.model_files import read_json, read_text, reading
from tidemill.workers.options import ANY, Purpose

SCORE = "score.weight"
"""The head of a sequence classifier."""

CLASSIFIER, BARE = "ForSequenceClassification", "Model"
"""The ends of the names of architectures that pool."""

ANSWERS = ("no", "yes")
"""The tokens whose logits a model that ranks compares."""

MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that are known."""


def converted(
    folder: Path, raw: Raw, config: ArchitectureConfig, purpose: Purpose
) -> tuple[ArchitectureConfig, Pooling | None]:
    """Return the model with the head that `purpose` needs, and what it pools; None if it generates. Raises
    ModelError."""
    name = str((raw.get("architectures") or [""])[0])
    is_classifier, modules = name.endswith(CLASSIFIER), _modules(folder)
    pools = is_classifier or name.endswith(BARE) or modules is not None
    if purpose.runner == "generate" or (purpose == ANY and not pools):
        if purpose.convert not in ("auto", "none"):
            raise ModelError(f"--convert {purpose.convert} is for models that pool: set --runner to pooling")
        if is_classifier or name.endswith(BARE):
            raise ModelError(f"{folder} is a {name}, which generates nothing: leave out --runner generate")
        return config, None
    if purpose.convert == "none" and not pools:
        if purpose.runner == "auto":
            return config, None
        raise ModelError(f"{folder} is a {name}, which generates: set --convert to embed or classify")
    if purpose.convert == "classify" or (is_classifier and purpose.convert != "embed"):
        head, labels = _label(folder, raw) if is_classifier else _answers(folder, config)
        return replace(config, head=head, labels=labels), Pooling(kind="classify", size=len(labels))
    normalize = modules is None or _normalizes(folder, modules)
    pooling = Pooling(
        kind="embed", size=config.hidden, normalize=normalize, dimensions=_dimensions(raw, config.hidden)
    )
    return replace(config, head=""), pooling


def _label(folder: Path, raw: Raw) -> tuple[str, tuple[int, ...]]:
    """Return the head of a sequence classifier and its row."""
    count: Any = raw.get("num_labels") or len(raw.get("id2label") or ANSWERS)
    if count != 1:
        raise ModelError(f"{folder} has {count} labels: a model that ranks has 1")
    return SCORE, (0,)


def _answers(folder: Path, config: ArchitectureConfig) -> tuple[str, tuple[int, ...]]:
    """Return the head of a model that generates, and the rows of it that rank."""
    path = folder / "tokenizer.json"
    found = read_json(path)
    with reading(path):
        rows = tuple(found["model"]["vocab"].get(answer) for answer in ANSWERS)
    if None in rows:
        raise ModelError(f"{path} has no tokens {' and '.join(ANSWERS)}, by which --convert classify ranks")
    return f"{config.prefix}embed_tokens.weight" if config.tied else HEAD, rows


def _dimensions(raw: Raw, hidden: int) -> tuple[int, ...] | None:
    """Return the shorter lengths of an embedding that the model allows: (): any, None: none."""
    given = cast("list[Any]", raw.get("matryoshka_dimensions") or [])
    are_lengths = type(given) is list and all(type(n) is int and 0 < n <= hidden for n in given)
    require(are_lengths, f"matryoshka_dimensions is {given!r}: give lengths of 1 to {hidden}")
    return tuple(given) if given or raw.get("is_matryoshka") else None


def _modules(folder: Path) -> dict[str, Path] | None:
    """Return the modules of sentence-transformers with their folders; None for a folder without."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    with reading(path):
        listed: list[dict[str, str]] = json.loads(read_text(path))
        return {module["type"].rpartition(".")[2]: folder / module["path"] for module in listed}


def _normalizes(folder: Path, modules: dict[str, Path]) -> bool:
    """Return whether embeddings have the length 1, after a check that they are made as ours are. Raises
    ModelError."""
    unknown = modules.keys() - set(MODULES)
    if unknown:
        raise ModelError(f"{folder} has the module {min(unknown)}: supported are {', '.join(MODULES)}")
    path = modules.get("Pooling", folder / "1_Pooling") / "config.json"
    found = read_json(path)
    kinds = {name.removeprefix("pooling_mode_") for name, is_set in found.items() if is_set is True}
    kinds = {str(found["pooling_mode"])} if "pooling_mode" in found else kinds - {"include_prompt"}
    if kinds != {"lasttoken"}:
        raise ModelError(
            f"{path} pools by {' and '.join(sorted(kinds)) or 'nothing'}: only lasttoken is supported,"
            " because the pages of a cached prompt do not hold the hidden states of its other tokens"
        )
    return "Normalize" in modules
