"""Loads a model folder: which architectures there are, what the engine needs to know of a loaded model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.layout import LayerSpec
from tidemill.kvstore.worth import Cost
from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.models import qwen3_next_config
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.checkpoint import Checkpoint, Progress, read_json
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.qwen3_next import Qwen3Next

SUPPORTED = ("Qwen3NextForCausalLM",)


class Model(Protocol):
    """What the engine runs."""

    def forward(self, inputs: Inputs, caches: Caches) -> torch.Tensor:
        """Hidden states `[T, hidden]` of the step's tokens; updates `caches`."""
        ...

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` of some of those hidden states."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    max_length      tokens of prompt and answer together
    eos_ids         token ids that end an answer
    fingerprint     digest of architecture, config and weights, for the namespace of keys
    cost            FLOPs of its forward pass
    """

    model: Model
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_length: int
    eos_ids: frozenset[int]
    fingerprint: str
    cost: Cost


def load(folder: Path, operators: Operators, progress: Progress) -> LoadedModel:
    """The model of a Hugging Face folder; `progress(done_bytes, total_bytes)` is called per tensor.

    Raises ModelError, with one line that names the fix, when the folder cannot be served.
    """
    raw, config, checkpoint = _open(folder, progress)
    model = Qwen3Next(config, checkpoint.read, operators)
    return LoadedModel(
        model=model,
        layers=config.layers,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        eos_ids=_eos_ids(folder, raw),
        fingerprint=checkpoint.fingerprint(f"{_architecture(raw)} {config}"),
        cost=qwen3_next_config.cost(config),
    )


def describe(folder: Path) -> tuple[tuple[LayerSpec, ...], int]:
    """Layers and length limit of a model, without reading its weights. Raises the ModelError that `load`
    would, as far as headers tell."""
    _, config, _ = _open(folder, lambda _done_bytes, _total_bytes: None)
    return config.layers, config.max_length


def _open(folder: Path, progress: Progress) -> tuple[dict[str, Any], qwen3_next_config.Config, Checkpoint]:
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}: give a Hugging Face folder or one of {', '.join(bundled())}"
        )
    raw = read_json(folder / "config.json")
    if _architecture(raw) not in SUPPORTED:
        raise ModelError(f"{folder} is a {_architecture(raw)}: supported are {', '.join(SUPPORTED)}")
    config = qwen3_next_config.parse(raw)
    checkpoint = Checkpoint(folder, progress)
    checkpoint.check(qwen3_next_config.tensor_shapes(config), _ignored)
    return raw, config, checkpoint


def _architecture(config: dict[str, Any]) -> str:
    return (config.get("architectures") or ["unknown"])[0]


def _ignored(name: str) -> bool:
    """Tensors that may be there and are not read: the draft layer, and the copy of tied embeddings."""
    return name.startswith("mtp.") or name == "lm_head.weight"


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """generation_config.json rules: chat models end turns with more tokens than config.json names."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    ids = config.get("eos_token_id") if found is None else found
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
