"""Load a model folder: the known architectures, and what the engine needs of a loaded model."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored, plain
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.quantization import Quantization
from tidemill.kvstore.layout import LayerSpec, Linear
from tidemill.kvstore.memory.recompute_cost import RecomputeCost
from tidemill.workers.device import HOST
from tidemill.workers.messages import Pooling
from tidemill.workers.models.architectures import deepseek, gpt_oss, granite, qwen3, qwen3_next
from tidemill.workers.models.architectures.config import (
    DRAFT,
    HEAD,
    ArchitectureConfig,
    LayerConfig,
    cost,
    local,
    weights_of,
)
from tidemill.workers.models.architectures.decoder import Decoder
from tidemill.workers.models.architectures.mtp import MtpHead
from tidemill.workers.models.architectures.pooling import BARE, CLASSIFIER, SCORE, converted
from tidemill.workers.models.collectives import LEADER, WHOLE, Sharing
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.inputs import Caches, Inputs, Kept
from tidemill.workers.models.loading.checkpoint import Progress, WeightsFolder
from tidemill.workers.models.loading.config_json import Raw
from tidemill.workers.models.loading.dummy import DummyWeights
from tidemill.workers.models.loading.gguf import GgufWeights, gguf_files
from tidemill.workers.models.loading.kv_scales import KvScales, kv_scales
from tidemill.workers.models.loading.sharding import RankPart, RankSlice, Replicated
from tidemill.workers.models.loading.weights import Weight
from tidemill.workers.models.model_files import eos_ids_of, read_json, reading
from tidemill.workers.options import ANY, LoadFormat, Purpose
from tidemill.workers.sources.names import bundled

log = logging.getLogger(__name__)

Pack: TypeAlias = Callable[[Sequence[Stored], torch.Tensor | None], Packed]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. `parse` makes its config from a config.json, `draft` the layer of its prediction head
    if it can have one. `ignored` has prefixes of tensors that may exist and are not read, in which `{layers}`
    is the number of layers."""

    parse: Callable[[Raw], ArchitectureConfig]
    ignored: tuple[str, ...] = ()
    draft: Callable[[Raw], LayerConfig] | None = None


IMAGES = "model.visual."
"""The prefix of the part that sees images, which texts do not need."""

ARCHITECTURES = {
    "DeepseekV3ForCausalLM": Architecture(deepseek.parse, ignored=("model.layers.{layers}.",)),
    "GptOssForCausalLM": Architecture(gpt_oss.parse),
    "GraniteMoeHybridForCausalLM": Architecture(granite.parse),
    "LlamaForCausalLM": Architecture(qwen3.parse_llama),
    "Qwen2ForCausalLM": Architecture(qwen3.parse_qwen2),
    "Qwen3ForCausalLM": Architecture(qwen3.parse_qwen3),
    "Qwen3MoeForCausalLM": Architecture(qwen3.parse_qwen3),
    "Qwen3NextForCausalLM": Architecture(qwen3_next.parse, (DRAFT,), qwen3_next.draft_of),
    "Qwen3_5ForCausalLM": Architecture(qwen3_next.parse_qwen3_5, (DRAFT,), qwen3_next.draft_of_qwen3_5),
    "Qwen3_5ForConditionalGeneration": Architecture(
        qwen3_next.parse_qwen3_5, (DRAFT, IMAGES), qwen3_next.draft_of_qwen3_5
    ),
    "Qwen3_5MoeForCausalLM": Architecture(qwen3_next.parse_qwen3_5, (DRAFT,), qwen3_next.draft_of_qwen3_5),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        qwen3_next.parse_qwen3_5, (DRAFT, IMAGES), qwen3_next.draft_of_qwen3_5
    ),
}
"""The architectures by their name in `architectures` of config.json."""

NORM = "norm.weight"
"""The final norm, behind the prefix of a model."""

INV_FREQ = ".rotary_emb.inv_freq"
"""A tensor that some folders hold, although it follows from config.json."""


class Model(Protocol):
    """The model that the engine runs."""

    @property
    def ops(self) -> Operators:
        """The operators on its device, which also draw from its logits."""
        ...

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
        """Return the hidden states `[T, hidden]` of the step's tokens, or those of `kept`; update
        `caches`."""
        ...

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits `[N, vocabulary]` of some of those hidden states; `[N, 0]` on all ranks but the
        leader."""
        ...


class DraftHead(Protocol):
    """A prediction head of the model: see workers/execution/mtp_drafter.py."""

    def forward(self, hidden_TH: torch.Tensor, inputs: Inputs, caches: Caches) -> torch.Tensor:
        """Return hidden states `[T, hidden]`, whose logits predict the token after the next. `hidden_TH` are
        those after the tokens before the step's. Updates its keys and values, the last of `caches.kv`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, or a rank's part of it.

    head            None: it has none, or none was requested
    layers          of the whole model, that of the head the last
    local_layers    of this rank: they determine the layout of its arena
    max_length      tokens of prompt and answer together
    eos_ids         token ids that end an answer
    fingerprint     digest of architecture, config and weights, for the namespace of keys: the leader's is
                    the same in groups of every size, that of other ranks is empty
    cost            FLOPs of its forward pass
    pooling         what it pools; None: it generates
    expert_pairs_R  int64, the pairs of a token and one of its experts so far, by the rank that has the
                    expert; None: they are not counted
    kv_scales       of pages of FP8, for each layer with pages; empty: all 1
    """

    model: Model
    head: DraftHead | None
    layers: tuple[LayerSpec, ...]
    local_layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_length: int
    eos_ids: frozenset[int]
    fingerprint: str
    cost: RecomputeCost
    pooling: Pooling | None = None
    expert_pairs_R: torch.Tensor | None = None
    kv_scales: tuple[KvScales, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The numbers that decide how much memory and time a model takes. `weight_bytes` are those that `load`
    puts on the devices of all ranks together."""

    layers: tuple[LayerSpec, ...]
    max_length: int
    vocab_size: int
    weight_bytes: int
    cost: RecomputeCost


def load(  # noqa: PLR0913  each is a part of the worker or a setting
    folder: Path,
    operators: Operators,
    progress: Progress,
    sharing: Sharing = WHOLE,
    device: torch.device = HOST,
    *,
    mtp: bool = False,
    compute_dtype: ComputeDtype | None = None,
    load_format: LoadFormat = "auto",
    quantization: Quantization | None = None,
    purpose: Purpose = ANY,
    fixed_kv_scales: bool = False,
) -> LoadedModel:
    """Load the model of a Hugging Face folder, or this rank's part of it, with its weights on `device`, and
    with `mtp` also its prediction head. With `load_format` dummy the weights are random, and config.json
    suffices.

    `progress(done_bytes, total_bytes)` is called per tensor. Tensors are moved one by one: host memory holds
    at most one of them for long.

    With `quantization` matrices in floats become codes. It, `compute_dtype` and the way in which ranks sum
    are parts of the fingerprint. With bfloat16, matrices are rounded to it; with float32, on a CUDA device
    all weights become float32. Elsewhere `operators` decide on products. With `fixed_kv_scales` the folder's
    scales of keys and values are read.

    The leader reads all bytes, for the fingerprint, the other ranks just theirs. Raises ModelError, with one
    line that names the fix, when the folder cannot be served or the ranks cannot share the model.
    """
    ranks, sums, by_expert = sharing
    is_leader = ranks.index == LEADER
    source = Source(folder, load_format, quantization)
    opened = _open(source, progress, digests=is_leader, mtp=mtp, purpose=purpose)
    raw, config, checkpoint, pooling = opened
    part = RankPart(ranks.index, ranks.size, sums, by_expert)
    own, weights = local(config, part), weights_of(config)

    def read(name: str, rows: RankSlice | None = None) -> Stored:
        found = checkpoint.read(name, rows or weights[name].part(part))
        if found.scales is None and compute_dtype == "bfloat16" and found.codes.dim() > 1:
            found = plain(found.codes.bfloat16())
        if compute_dtype == "float32" and device.type == "cuda":
            if found.kind == "w8a8":
                raise ModelError(
                    f"{name} has INT8 products, in bfloat16 on CUDA: set --compute-dtype bfloat16"
                )
            found = plain(found.values.float())
        return found.moved(lambda tensor: tensor.to(device))

    rows = RankSlice(tuple((row, row + 1) for row in config.labels))
    labels = read(config.head, rows) if config.labels else None
    counts = by_expert and is_leader
    kinds = _Kinds()
    operators = replace(operators, pack=kinds.counting(operators.pack))
    model = Decoder(own, read, operators, ranks, labels=labels, sums=sums, counts=counts)
    scales: tuple[KvScales, ...] = ()
    if fixed_kv_scales and isinstance(checkpoint, WeightsFolder):
        scales = kv_scales(checkpoint, _paged(config))
    head = None if own.draft is None else MtpHead(own, own.draft, read, model, operators, ranks)
    kinds.log(checkpoint.widened)
    identity = f"{_architecture(raw)} {config} {compute_dtype} {part}{scales or ''}".rstrip()
    identity += f" {quantization}" if quantization else ""
    return LoadedModel(
        model=model,
        head=head,
        layers=config.specs,
        local_layers=own.specs,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        eos_ids=eos_ids_of(folder, raw) & frozenset(range(config.vocab_size)),
        fingerprint=checkpoint.fingerprint(identity) if is_leader else "",
        cost=cost(config),
        pooling=pooling,
        expert_pairs_R=model.expert_pairs_R,
        kv_scales=scales,
    )


def _paged(config: ArchitectureConfig) -> list[str]:
    """Return the prefixes of the layers with pages, that of the prediction head the last."""
    prefixes = [f"{config.prefix}layers.{index}." for index in range(len(config.layers))]
    layers = zip([*prefixes, f"{DRAFT}layers.0."], config.every_layer, strict=False)
    return [prefix for prefix, layer in layers if not isinstance(layer.mixer.spec, Linear)]


def describe(
    folder: Path,
    tensor_parallel_size: int = 1,
    *,
    mtp: bool = False,
    load_format: LoadFormat = "auto",
    quantization: Quantization | None = None,
    by_expert: bool = False,
    purpose: Purpose = ANY,
) -> tuple[tuple[LayerSpec, ...], int]:
    """Return the layers of the whole model and its length limit, without reading its weights. Raises the
    ModelError that `load` would in a group of this size, as far as headers show."""
    raw, config, *_ = _open(
        Source(folder, load_format, quantization), no_progress, digests=False, mtp=mtp, purpose=purpose
    )
    eos_ids_of(folder, raw)
    local(config, RankPart(size=tensor_parallel_size, sums=by_expert, by_expert=by_expert))
    return config.specs, config.max_length


def sizes_of(
    folder: Path,
    compute_dtype: ComputeDtype,
    *,
    mtp: bool = False,
    load_format: LoadFormat = "auto",
    quantization: Quantization | None = None,
    purpose: Purpose = ANY,
) -> ModelSizes:
    """Return the sizes of the model, without reading its weights. Raises ModelError."""
    source = Source(folder, load_format, quantization)
    _, config, checkpoint, _ = _open(source, no_progress, digests=False, mtp=mtp, purpose=purpose)
    float_bytes = 2 if compute_dtype == "bfloat16" else 4
    return ModelSizes(
        layers=config.specs,
        max_length=config.max_length,
        vocab_size=config.vocab_size,
        weight_bytes=sum(checkpoint.num_bytes(name, float_bytes) for name in weights_of(config)),
        cost=cost(config),
    )


def compute_dtype_of(
    folder: Path, load_format: LoadFormat = "auto", *, on_cuda: bool = False
) -> ComputeDtype:
    """Return the type of products if none is set: float32 for weights in float32, off CUDA also for those
    in float16, else bfloat16. Raises ModelError."""
    _check_folder(folder)
    with reading(folder / "config.json"):
        checkpoint = _weights(Source(folder, load_format), read_json(folder / "config.json"), no_progress)
    return "float32" if checkpoint.dtypes <= ({"F32"} if on_cuda else {"F32", "F16"}) else "bfloat16"


def has_head(folder: Path, load_format: LoadFormat = "auto") -> bool:
    """Return whether `load` finds a prediction head; random weights have one only on request. Raises
    ModelError for a folder without a model."""
    with reading(folder / "config.json"):
        raw = read_json(folder / "config.json")
        architecture = ARCHITECTURES.get(_architecture(raw))
        if architecture is None or architecture.draft is None:
            return False
        return _holds_head(_weights(Source(folder, load_format), raw, no_progress))


def _holds_head(checkpoint: "_Weights") -> bool:
    return any(name.startswith(DRAFT) for name in checkpoint.names)


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Report nothing."""


_Weights = WeightsFolder | GgufWeights | DummyWeights
_Opened = tuple[dict[str, Any], ArchitectureConfig, _Weights, Pooling | None]


class _Kinds:
    """Counts the matrices in codes that operators pack, as they are or widened, by their kind."""

    def __init__(self) -> None:
        self._kept, self._widened = Counter[str](), Counter[str]()

    def counting(self, pack: Pack) -> Pack:
        def counted(parts: Sequence[Stored], bias_N: torch.Tensor | None) -> Packed:
            packed = pack(parts, bias_N)
            kept = {segment.kind for segment in packed.segments}
            for part in parts:
                if part.scales is not None:
                    (self._kept if part.kind in kept else self._widened)[part.kind] += 1
            return packed

        return counted

    def log(self, read_as_floats: Sequence[str]) -> None:
        """Log a line, unless there are no codes."""
        if not (self._kept or self._widened or read_as_floats):
            return
        kept, widened = (
            ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
            for counts in (self._kept, self._widened)
        )
        first = f", the first {read_as_floats[0]}" if read_as_floats else ""
        log.info(
            "matrices computed with as stored: %s; widened, since this variant does not take the kind, its "
            "groups or its scales: %s; widened when read, since columns are not in equal groups, in another "
            "order, cut by ranks or e5m2: %d%s",
            kept, widened, len(read_as_floats), first,
        )  # fmt: skip


class Source(NamedTuple):
    """The place of the weights, and what is made of them."""

    folder: Path
    load_format: LoadFormat
    quantization: Quantization | None = None


def _open(source: Source, progress: Progress, *, digests: bool, mtp: bool, purpose: Purpose) -> _Opened:
    _check_folder(source.folder)
    with reading(source.folder / "config.json"):
        return _opened(source, progress, digests=digests, mtp=mtp, purpose=purpose)


def _opened(source: Source, progress: Progress, *, digests: bool, mtp: bool, purpose: Purpose) -> _Opened:
    folder = source.folder
    raw = read_json(folder / "config.json")
    architecture = ARCHITECTURES.get(_architecture(raw))
    if architecture is None:
        raise ModelError(f"{folder} is a {_architecture(raw)}: supported are {', '.join(ARCHITECTURES)}")
    config = architecture.parse(raw)
    checkpoint = _weights(source, raw, progress, digests=digests)
    if isinstance(checkpoint, WeightsFolder):
        if config.tied and checkpoint.differ(HEAD, f"{config.prefix}embed_tokens.weight"):
            config = replace(config, tied=False)
        if f"{config.prefix}{NORM}" not in checkpoint.names and NORM in checkpoint.names:
            config = replace(config, prefix="")  # saved without its head, as embedders are
    config, pooling = converted(folder, raw, config, purpose)
    if mtp and pooling is None:
        if architecture.draft is None or not (
            isinstance(checkpoint, DummyWeights) or _holds_head(checkpoint)
        ):
            raise ModelError(
                f"{folder} has no prediction head (tensors {DRAFT}*): set --speculative-method to ngram"
            )
        config = replace(config, draft=architecture.draft(raw))

    prefixes = tuple(prefix.format(layers=len(config.layers)) for prefix in architecture.ignored)

    def ignored(name: str) -> bool:
        """Return whether a tensor is not read: an ignored one, or the copy of tied embeddings."""
        return name in (HEAD, SCORE) or name.endswith(INV_FREQ) or name.startswith(prefixes)

    weights = weights_of(config)
    if config.labels:
        rows = len(config.labels) if config.head == SCORE else config.vocab_size
        weights[config.head] = Weight((rows, config.hidden), Replicated(), role="precise")
    checkpoint.check(weights, ignored)
    return raw, config, checkpoint, pooling


def _weights(source: Source, raw: Raw, progress: Progress, *, digests: bool = False) -> _Weights:
    """Open the weights. Raises ModelError."""
    folder, load_format, quantize = source
    if load_format == "dummy":
        return DummyWeights(raw, progress, quantize)
    if gguf_files(folder):
        if quantize is not None:
            raise ModelError(f"{folder} has GGUF files, with their own kinds: leave out --quantization")
        return GgufWeights(folder, progress, digests=digests)
    quantization = raw.get("quantization_config")
    if quantization is None and (folder / "hf_quant_config.json").exists():  # of older versions of modelopt
        quantization = {"quant_method": "modelopt"}
    return WeightsFolder(folder, progress, digests=digests, quantization=quantization, quantize=quantize)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}: give a Hugging Face folder, a repository of the hub like "
            f"Qwen/Qwen3-0.6B, or one of {', '.join(bundled())}"
        )


def _architecture(config: dict[str, Any]) -> str:
    """Return the name of the architecture, with the head that generates if it has another one or none."""
    name = str((config.get("architectures") or ["unknown"])[0])
    generating = f"{name.removesuffix(CLASSIFIER).removesuffix(BARE)}ForCausalLM"
    return generating if generating in ARCHITECTURES else name
