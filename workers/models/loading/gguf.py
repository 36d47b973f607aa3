"""Read the weights of GGUF files in the place of WeightsFolder: quantised ones stay codes."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from tidemill.kernels.linear.stored import Stored, has_nan, join, plain
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.checkpoint import Progress
from tidemill.workers.models.loading.dequantise import cut, picked
from tidemill.workers.models.loading.digests import Digests
from tidemill.workers.models.loading.gguf_blocks import stored_of
from tidemill.workers.models.loading.gguf_changes import original
from tidemill.workers.models.loading.sharding import RankSlice
from tidemill.workers.models.loading.tensor_files import Span
from tidemill.workers.models.loading.weights import Weight
from tidemill.workers.sources.gguf_families import OUTSIDE, Family, config_of, family_of
from tidemill.workers.sources.gguf_header import GgufTensor, read_header

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
UNREAD = ("rope_freqs.weight",)
"""Tensors whose content is in config.json."""


class Place(NamedTuple):
    """The tensors of files, joined by rows, that are one of ours; of an expert that row of them. `change` is
    what the converter to GGUF has done to it."""

    tensors: tuple[str, ...]
    expert: int | None
    change: str


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder that `unpack` has made; none for one with other weights."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))


class GgufWeights:
    """The tensors of the GGUF files of a model by the names that the model knows."""

    def __init__(self, folder: Path, progress: Progress, *, digests: bool) -> None:
        """Read the headers. Raises SourceError and ModelError."""
        self._folder = folder
        self._progress = progress
        self._files = [read_header(path) for path in gguf_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self._family: Family = family_of(self._files[0])
        self._config = config_of(self._files[0], frozenset(self._file_of))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._digests = Digests(wanted=digests)
        self._done_bytes = 0
        self.widened: list[str] = []
        """The tensors that have codes in the files and are read as floats."""

    @property
    def dtypes(self) -> set[str]:
        """The kinds of all tensors."""
        return {tensor.kind.name for file in self._files for tensor in file.tensors.values()}

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors outside of layers."""
        return {ours for ours, theirs in OUTSIDE.items() if theirs in self._file_of}

    def check(self, weights: Mapping[str, Weight], ignored: Callable[[str], bool]) -> None:
        """Raise ModelError unless the files hold exactly these tensors. Only they can be read."""
        del ignored
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        used = set(UNREAD)
        for name, shape in self._shapes.items():
            place = self._place(name)
            used |= set(place.tensors)
            found = [self._shape(theirs, place.expert) for theirs in place.tensors]
            if _sizes(found, _joined(name)) != _sizes([shape]):
                raise ModelError(
                    f"{self._folder} has {' + '.join(place.tensors)} of {found} where its metadata ask for "
                    f"{shape}: download the file again"
                )
        if unused := self._file_of.keys() - used:
            raise ModelError(
                f"{self._folder} has {len(unused)} tensors that its architecture does not know, such as "
                f"{min(unused)}: use the model's Hugging Face folder"
            )

    def read(self, name: str, part: RankSlice) -> Stored:
        """Return the part of a tensor, in memory of its own, as codes if it is stored so."""
        place = self._place(name)
        raws = {theirs: self._raw(theirs, place.expert) for theirs in place.tensors}
        self._done_bytes += sum(raw.nbytes for raw in raws.values())
        with self._digests.reading({theirs: self._digested(theirs) for theirs in place.tensors}):
            found = self._part(name, raws, place.change, part)
        if found.scales is None and not any(map(self._is_float, place.tensors)):
            self.widened.append(name)
        self._progress(self._done_bytes, sum(len(file.mapped) for file in self._files))
        parts = (found.codes if found.scales is None else found.scales, found.offsets)
        if any(part is not None and has_nan(part) for part in parts):
            raise ModelError(f"{self._folder}: the tensor {name} holds NaN: download the file again")
        return found

    def num_bytes(self, name: str, float_bytes: int) -> int:
        """Return the size of a tensor in memory, where floats take `float_bytes`."""
        place, found = self._place(name), 0
        for theirs in place.tensors:
            tensor = self._tensor(theirs)
            row = torch.zeros(1, tensor.num_bytes // prod(tensor.shape[:-1]), dtype=torch.uint8)
            share = 1 if place.expert is None else tensor.shape[0]
            if self._is_float(theirs):
                found += prod(tensor.shape) // share * float_bytes
            else:
                of_row = stored_of(tensor.kind.name, row, theirs).num_bytes
                found += prod(tensor.shape[:-1]) // share * of_row
        return found

    def fingerprint(self, config: str) -> str:
        """Return the digest of `config` and of every tensor read so far, independent of order and files."""
        return self._digests.fingerprint(f"gguf\n{config}")

    def _part(self, name: str, raws: Mapping[str, torch.Tensor], change: str, part: RankSlice) -> Stored:
        """Return a part of tensors that are joined by rows. Where it is rows of each, other rows are left
        alone."""
        shape = self._shapes[name]
        joined = max(len(shape) + _joined(name), 0)
        if len(raws) == 1:
            ((theirs, raw),) = raws.items()
            raws = {theirs: raw.reshape(shape if self._is_float(theirs) else (*shape[:-1], -1))}
        is_cut = part.is_all(shape)
        by_rows = part.dim < len(shape) - 1 and (len(raws) == 1 or part.dim < joined)
        if by_rows and not (is_cut or change or part.zeros):
            raws, is_cut = {theirs: picked(raw, part) for theirs, raw in raws.items()}, True
        whole = join([self._stored(theirs, raw) for theirs, raw in raws.items()], joined)
        whole = original(whole, change, self._config)
        return whole if is_cut else cut(whole, part)

    def _place(self, name: str) -> Place:
        """Return where one of our tensors is. Raises ModelError."""
        prefix, expert, layer = "", None, IN_LAYER.fullmatch(name)
        ours, table = name, OUTSIDE
        if layer is not None:
            number, ours = layer.groups()
            prefix, table = f"blk.{number}.", self._family.tensors
            if (of_expert := EXPERT.fullmatch(ours)) and ours not in table:
                before, number, behind = of_expert.groups()
                ours, expert = f"{before}.*.{behind}", int(number)
        choices = [
            tuple(f"{prefix}{theirs}" for theirs in choice.split(" + "))
            for choice in table.get(ours, f"({ours})").split(" | ")
        ]
        there = [tensors for tensors in choices if self._file_of.keys() >= set(tensors)]
        if not there:
            raise ModelError(
                f"{self._folder} has no tensor {' + '.join(choices[0])}: give all files of the model, or its "
                "Hugging Face folder"
            )
        return Place(there[0], expert, self._family.changes.get(ours, ""))

    def _tensor(self, name: str) -> GgufTensor:
        return self._file_of[name].tensors[name]

    def _digested(self, name: str) -> tuple[str, Span]:
        """Return the text and the bytes of a tensor, for its digest."""
        tensor = self._tensor(name)
        span = Span(self._file_of[name].mapped, tensor.start_byte, tensor.start_byte + tensor.num_bytes)
        return f"{tensor.kind.name} {tensor.shape}", span

    def _shape(self, name: str, expert: int | None) -> tuple[int, ...]:
        """Return the shape of a tensor, or of an expert in it; empty if it has too few of them."""
        shape = self._tensor(name).shape
        if expert is None:
            return shape
        return shape[1:] if expert < shape[0] else ()

    def _is_float(self, name: str) -> bool:
        return self._tensor(name).kind.name in FLOATS

    def _raw(self, name: str, expert: int | None) -> torch.Tensor:
        """Return a view of a tensor, `[.., N, K]` of floats or `[.., N, bytes]` of blocks, or that of an
        expert."""
        tensor, mapped = self._tensor(name), self._file_of[name].mapped
        dtype = FLOATS.get(tensor.kind.name, torch.uint8)
        count = tensor.num_bytes // dtype.itemsize
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=tensor.start_byte)
        whole = flat.view(*tensor.shape[:-1], -1)
        return whole if expert is None else whole[expert]

    def _stored(self, name: str, raw: torch.Tensor) -> Stored:
        if not self._is_float(name):
            found = stored_of(self._tensor(name).kind.name, raw, name)
            return found if raw.dim() > 1 else plain(found.values)
        return plain(raw.clone() if raw.dtype == torch.bfloat16 else raw.to(torch.float32, copy=True))


def _joined(name: str) -> int:
    """Return the dimension along which tensors are joined: of biases the last one, else that before it."""
    return -1 if name.endswith("bias") else -2


def _sizes(shapes: Sequence[tuple[int, ...]], joined: int = 0) -> list[int]:
    """Return the sizes of tensors that are joined along a dimension, except sizes of 1; none if they do not
    fit."""
    first, *others = (list(shape) for shape in shapes)
    for other in others:
        if len(other) != len(first) or len(first) < -joined:
            return []
        first[joined] += other[joined]
        other[joined] = first[joined]
        if other != first:
            return []
    return [size for size in first if size != 1]
