"""The safetensors files of a Hugging Face folder, memory-mapped: one, or an index and its shards."""

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from tidemill.kvstore.files import open_regular
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.model_files import read_json, reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""The dtypes of tensors that are read."""

CHUNK_BYTES = 16 << 20
"""The bytes that are read together of what is digested or compared."""


class Span(NamedTuple):
    """Bytes of a mapped file."""

    mapped: mmap.mmap
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def view(self) -> memoryview:
        return memoryview(self.mapped)[self.start : self.end]

    def chunks(self) -> "Iterator[Span]":
        """Yield them in parts of `CHUNK_BYTES`."""
        for start in range(self.start, self.end, CHUNK_BYTES):
            yield Span(self.mapped, start, min(start + CHUNK_BYTES, self.end))

    def drop(self) -> None:
        """Free their memory. They can be read again."""
        start = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        self.mapped.madvise(mmap.MADV_DONTNEED, start, self.end - start)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tensor: its dtype by the name of safetensors, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    span: Span


class TensorFiles:
    """The tensors of one folder by name. Bytes are read on access."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers. Raises ModelError when one is missing or damaged."""
        self.headers: dict[str, Header] = {}
        self.all_bytes = 0
        for name in _shards(folder):
            with reading(folder / name):
                mapped = _open(folder, name)
                self.headers |= _headers(mapped)
            self.all_bytes += len(mapped)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a read-only view of the mapped file, for a tensor that is not empty."""
        header = self.headers[name]
        return torch.frombuffer(header.span.view, dtype=DTYPES[header.dtype]).view(header.shape)


def _shards(folder: Path) -> list[str]:
    if not (folder / INDEX).exists():
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map")
    names = set(map(str, cast("dict[str, object]", files).values())) if isinstance(files, dict) else None
    if not names:
        raise ModelError(f"{folder / INDEX} has no weight_map: download the model again")
    if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise ModelError(f"{folder / INDEX} names {outside[0]!r}, not below the folder: download it again")
    return sorted(names)


def _open(folder: Path, name: str) -> mmap.mmap:
    path = folder / name
    try:
        with open_regular(path) as file, safe_open(str(path), framework="pt"):  # it checks the header
            # A private mapping, because torch has no read-only tensors.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        if name == SINGLE:
            fix = "convert the model to safetensors or download it again"
        else:
            fix = f"{INDEX} names it; download the model again"
        raise ModelError(f"{folder} has no {name}: {fix}") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download it again") from error


def _headers(mapped: mmap.mmap) -> dict[str, Header]:
    first = LENGTH_BYTES + int.from_bytes(mapped[:LENGTH_BYTES], "little")
    found: dict[str, dict[str, Any]] = json.loads(mapped[LENGTH_BYTES:first])
    found.pop("__metadata__", None)
    return {
        name: Header(
            header["dtype"],
            tuple(header["shape"]),
            Span(mapped, *(first + byte for byte in header["data_offsets"])),
        )
        for name, header in found.items()
    }
