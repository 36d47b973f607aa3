"""Reads the tensors of a Hugging Face folder: safetensors, memory-mapped, one file or an index of shards."""

import json
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from tidemill.workers.models.errors import ModelError
from tidemill.workers.tp.sharding import Part

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Progress = Callable[[int, int], None]


class Checkpoint:
    """The tensors of one folder by name; reading one counts its bytes and adds them to the fingerprint.

    Without `digests`, only the bytes of the parts asked for are read, and there is no fingerprint.
    """

    def __init__(self, folder: Path, progress: Progress, *, digests: bool) -> None:
        """Opens the files and reads their headers. Raises ModelError when one is missing or damaged."""
        self._folder = folder
        self._progress = progress
        self._digests = digests
        self._digest = xxhash.xxh3_128()
        self._files = {name: _open(folder / name) for name in _shards(folder)}
        self._file_of = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118  not a dict
        self._done_bytes = 0
        self._all_bytes = sum((folder / name).stat().st_size for name in self._files)

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool]) -> None:
        """Raises ModelError unless the folder holds exactly these tensors, those `ignored` aside."""
        _complain("lacks", [name for name in shapes if name not in self._file_of], self._folder)
        extra = [name for name in self._file_of if name not in shapes and not ignored(name)]
        _complain("has unexpected", extra, self._folder)
        for name, shape in shapes.items():
            header = self._files[self._file_of[name]].get_slice(name)
            found = tuple(header.get_shape())
            if found != shape:
                raise ModelError(
                    f"tensor {name} has shape {found} but config.json asks for {shape}: "
                    "the weights and config.json belong to different models"
                )
            if header.get_dtype() not in DTYPE_BYTES:
                raise ModelError(
                    f"tensor {name} is {header.get_dtype()}: quantised weights are not supported, "
                    "use a float32, bfloat16 or float16 checkpoint"
                )

    def rows(self, name: str) -> int:
        """How many rows the tensor has."""
        return int(self._files[self._file_of[name]].get_slice(name).get_shape()[0])

    def read(self, name: str, part: Part) -> torch.Tensor:
        """The rows of `part`, in bfloat16 if they are stored so, else in float32. Raises ModelError when
        bytes cannot be read."""
        file = self._files[self._file_of[name]]
        header = file.get_slice(name)
        try:
            source = self._digested(name, file.get_tensor(name)) if self._digests else header
            pieces = [
                _widened(cast("torch.Tensor", source[start:end])) for start, end in part.ranges if start < end
            ]
        except SafetensorError as error:
            raise ModelError(f"tensor {name} cannot be read ({error}): download the model again") from error
        shape = header.get_shape()
        self._done_bytes += prod(shape) * DTYPE_BYTES[header.get_dtype()]
        self._progress(self._done_bytes, self._all_bytes)
        if part.zeros:
            dtype = torch.bfloat16 if header.get_dtype() == "BF16" else torch.float32
            pieces.append(torch.zeros(part.zeros, *shape[1:], dtype=dtype))
        if len(pieces) == 1 and len(pieces[0]) == shape[0]:
            return pieces[0]
        # A copy: a view would keep the whole tensor in memory.
        return torch.cat(pieces)

    def _digested(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        self._digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return tensor

    def fingerprint(self, config: str) -> str:
        """Digest of `config` and of every tensor read so far, in the order of reading."""
        assert self._digests
        digest = self._digest.copy()
        digest.update(config.encode())
        return digest.hexdigest()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelError when it is missing or not an object."""
    try:
        content: Any = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: --model takes a Hugging Face folder") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: download the model again")
    return cast("dict[str, Any]", content)


def _shards(folder: Path) -> list[str]:
    if not (folder / INDEX).exists():
        return [SINGLE]
    return sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))


def _open(path: Path) -> Any:  # noqa: ANN401  safetensors has no types
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}: convert the model to safetensors or download it again"
        ) from error
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download it again") from error


def _complain(what: str, names: Collection[str], folder: Path) -> None:
    if names:
        shown, more = sorted(names)[:3], len(names) - 3
        listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        raise ModelError(
            f"{folder} {what} {'tensor' if len(names) == 1 else 'tensors'} {listed}: "
            "the weights and config.json belong to different models"
        )
