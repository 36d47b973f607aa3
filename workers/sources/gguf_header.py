"""Read the header of a GGUF file: metadata, and the kind, shape and bytes of each tensor.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: little-endian, version 2 or 3.
Others wrote the file, so each length is checked against the bytes that are left.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.kvstore.files import open_regular
from tidemill.workers.sources.names import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
DIMENSIONS_MAX = 4
TEXT, LIST = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?QqD", strict=True))
"""The types of metadata by their numbers, as `struct` names them; D is its d."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A kind of tensor: rows of blocks of `elements` numbers in `num_bytes` bytes."""

    name: str
    elements: int
    num_bytes: int


BLOCK_KINDS = {
    number: BlockKind(name, elements, num_bytes)
    for number, name, elements, num_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2),
        (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
    )
}  # fmt: skip
"""The kinds by their numbers in files."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape with rows before columns, and its bytes in the file."""

    kind: BlockKind
    shape: tuple[int, ...]
    start_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file, and the file mapped to memory."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    mapped: mmap.mmap


def read_header(path: Path) -> GgufFile:
    """Read a header. Raises SourceError when the file is damaged, cut short, or no GGUF."""
    try:
        with open_regular(path) as file:
            # A private mapping, because torch has no read-only tensors.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be opened ({error}): give a GGUF file") from error
    try:
        return _Reader(mapped).file(path)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(f"{path} is damaged or cut short ({error}): download it again") from error


class _Reader:
    """Reads a file from its begin. Raises ValueError and struct.error."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._at = 0

    def file(self, path: Path) -> GgufFile:
        magic, (version,) = self._take(4), self._numbers("I", 1)
        if magic != MAGIC or version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ValueError(f"{magic!r}, version {version}; GGUF in versions {known} is read")
        num_tensors, num_pairs = self._numbers("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = self._text()
            metadata[name] = self._value(self._numbers("I", 1)[0])
        headers = [self._header() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data = -(-self._at // alignment) * alignment
        tensors = {header[0]: self._tensor(data, *header) for header in headers}
        if len(tensors) < len(headers):
            raise ValueError("two tensors have one name")
        return GgufFile(path, metadata, tensors, self._mapped)

    def _header(self) -> tuple[str, int, tuple[int, ...], int]:
        name, (dims,) = self._text(), self._numbers("I", 1)
        if not 0 < dims <= DIMENSIONS_MAX:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed(self._numbers("Q", dims)))
        (kind,), (start,) = self._numbers("I", 1), self._numbers("Q", 1)
        return name, kind, shape, start

    def _tensor(self, data: int, name: str, number: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        kind = BLOCK_KINDS.get(number)
        if kind is None:
            raise ValueError(f"tensor {name} is of the unknown kind {number}")
        if 0 in shape or shape[-1] % kind.elements:
            raise ValueError(f"tensor {name} of {kind.name} has shape {shape}")
        num_bytes = prod(shape) // kind.elements * kind.num_bytes
        if data + start + num_bytes > len(self._mapped):
            raise ValueError(f"tensor {name} ends behind the end of the file")
        return GgufTensor(kind, shape, data + start, num_bytes)

    def _value(self, number: int) -> Any:  # noqa: ANN401 - metadata
        if number == TEXT:
            return self._text()
        if number != LIST:
            (value,) = self._numbers(_scalar(number), 1)
            return value
        (inner,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
        if inner != TEXT:
            return list(self._numbers(_scalar(inner), count))
        self._check(8 * count)
        return [self._text() for _ in range(count)]

    def _numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        letter = letter.lower() if letter == "D" else letter
        self._check(count * struct.calcsize(letter))
        found = struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}")))
        # The shortest number that is stored so: 1e-05 instead of 9.99999974e-06.
        return tuple(float(str(np.float32(value))) for value in found) if letter == "f" else found

    def _text(self) -> str:
        return self._take(self._numbers("Q", 1)[0]).decode()

    def _take(self, count: int) -> bytes:
        self._check(count)
        self._at += count
        return self._mapped[self._at - count : self._at]

    def _check(self, count: int) -> None:
        if count > len(self._mapped) - self._at:
            raise ValueError(f"{count} bytes from byte {self._at} on, but it ends at {len(self._mapped)}")


def _scalar(number: int) -> str:
    if number not in SCALARS:
        raise ValueError(f"metadata of the unknown type {number}")
    return SCALARS[number]
