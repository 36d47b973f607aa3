"""Loads a model folder: which architectures there are, what the engine needs to know of a loaded model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.layout import LayerSpec
from tidemill.kvstore.worth import Cost
from tidemill.workers.device import HOST
from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.models import qwen3_next_config
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.checkpoint import Checkpoint, Progress, read_json
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.qwen3_next import Qwen3Next
from tidemill.workers.models.qwen3_next_cuts import cut_of, local
from tidemill.workers.tp.collectives import ALONE, LEADER, Ranks
from tidemill.workers.tp.sharding import part_of

SUPPORTED = ("Qwen3NextForCausalLM",)


class Model(Protocol):
    """What the engine runs."""

    def forward(self, inputs: Inputs, caches: Caches) -> torch.Tensor:
        """Hidden states `[T, hidden]` of the step's tokens; updates `caches`."""
        ...

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` of some of those hidden states; `[N, 0]` on all ranks but the leader."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, or a rank's part of it.

    layers          of the whole model
    local_layers    of this rank: what its arena is laid out by
    max_length      tokens of prompt and answer together
    eos_ids         token ids that end an answer
    fingerprint     digest of architecture, config and weights, for the namespace of keys; the leader's is the
                    same in groups of every size, that of other ranks is empty
    cost            FLOPs of its forward pass
    """

    model: Model
    layers: tuple[LayerSpec, ...]
    local_layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_length: int
    eos_ids: frozenset[int]
    fingerprint: str
    cost: Cost


def load(
    folder: Path,
    operators: Operators,
    progress: Progress,
    ranks: Ranks = ALONE,
    device: torch.device = HOST,
) -> LoadedModel:
    """The model of a Hugging Face folder, or this rank's part of it, with its weights on `device`.

    `progress(done_bytes, total_bytes)` is called per tensor. Tensors are moved one by one: host memory holds
    no more than one of them for long.

    The leader reads all bytes, for the fingerprint, the other ranks just theirs. Raises ModelError, with one
    line that names the fix, when the folder cannot be served or the ranks cannot share the model.
    """
    is_leader = ranks.index == LEADER
    raw, config, checkpoint = _open(folder, progress, digests=is_leader)
    own = local(config, ranks.size)

    def read(name: str) -> torch.Tensor:
        rows = checkpoint.rows(name)
        part = part_of(cut_of(config, name, rows), rows, ranks.index, ranks.size)
        return checkpoint.read(name, part).to(device)

    model = Qwen3Next(own, read, operators, ranks)
    return LoadedModel(
        model=model,
        layers=config.layers,
        local_layers=own.layers,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        eos_ids=_eos_ids(folder, raw),
        fingerprint=checkpoint.fingerprint(f"{_architecture(raw)} {config}") if is_leader else "",
        cost=qwen3_next_config.cost(config),
    )


def describe(folder: Path, tensor_parallel_size: int = 1) -> tuple[tuple[LayerSpec, ...], int]:
    """Layers of the whole model and its length limit, without reading its weights. Raises the ModelError that
    `load` would in a group of this size, as far as headers tell."""
    _, config, _ = _open(folder, lambda _done_bytes, _total_bytes: None, digests=False)
    local(config, tensor_parallel_size)
    return config.layers, config.max_length


def _open(
    folder: Path, progress: Progress, *, digests: bool
) -> tuple[dict[str, Any], qwen3_next_config.Config, Checkpoint]:
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}: give a Hugging Face folder or one of {', '.join(bundled())}"
        )
    raw = read_json(folder / "config.json")
    if _architecture(raw) not in SUPPORTED:
        raise ModelError(f"{folder} is a {_architecture(raw)}: supported are {', '.join(SUPPORTED)}")
    config = qwen3_next_config.parse(raw)
    checkpoint = Checkpoint(folder, progress, digests=digests)
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
