"""Random weights for a config.json alone: tests of speed and memory at sizes that are not at hand."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
import xxhash

from tidemill.kernels.linear.stored import Stored, plain
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.loading.checkpoint import Progress
from tidemill.workers.models.loading.dequantise import cut
from tidemill.workers.models.loading.quantise import floats_bytes, quantised, recipe_of
from tidemill.workers.models.loading.sharding import RankSlice
from tidemill.workers.models.loading.weights import Weight

HIGH = 1e-3
"""The values are uniform in [-HIGH, HIGH), as those of other engines."""

PERIOD = 1_048_583
"""Values of a tensor repeat after this many, a prime: rows and columns differ, and large tensors are fast."""

WIDE = {"float32": "F32", "float16": "F16"}


class DummyWeights:
    """The tensors that a model asks for, in the place of WeightsFolder.

    Each is a function of its name, so that all workers and ranks have the same model. Weights of quantised
    folders count as plain ones.
    """

    names: Collection[str] = ()
    widened: Sequence[str] = ()

    def __init__(
        self, raw: Mapping[str, Any], progress: Progress, quantize: Quantization | None = None
    ) -> None:
        self._quantize: Quantization | None = quantize
        self.dtypes = named_dtypes(raw)
        self._dtype = torch.bfloat16 if self.dtypes == {"BF16"} else torch.float32  # as of WeightsFolder
        self._progress = progress
        self._weights: dict[str, Weight] = {}
        self._done_bytes = self._total_bytes = 0

    def check(self, weights: Mapping[str, Weight], ignored: Callable[[str], bool]) -> None:
        """Take the shapes of the tensors that will be read."""
        del ignored
        self._weights = dict(weights)
        count = sum(prod(weight.shape) for weight in weights.values())
        self._total_bytes = count * self._dtype.itemsize

    def read(self, name: str, part: RankSlice) -> Stored:
        """Return the part of a tensor, in memory of its own."""
        weight = self._weights[name]
        shape, recipe = weight.shape, recipe_of(weight, self._quantize)
        count, draw = prod(shape), torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        block = torch.empty(min(count, PERIOD)).uniform_(-HIGH, HIGH, generator=draw).to(self._dtype)
        whole = block.repeat(-(-count // PERIOD))[:count].view(shape)
        found = cut(plain(whole) if recipe is None else quantised(plain(whole), recipe), part)
        self._done_bytes += whole.nbytes
        self._progress(self._done_bytes, self._total_bytes)
        return found

    def num_bytes(self, name: str, float_bytes: int) -> int:
        """Return the size of a tensor in memory, where floats take `float_bytes`."""
        return floats_bytes(self._weights[name], self._quantize, float_bytes)

    def fingerprint(self, config: str) -> str:
        """Return the digest of `config`, on which all else depends."""
        return xxhash.xxh3_128_hexdigest(f"dummy {self._dtype} {config}".encode())


def named_dtypes(raw: Mapping[str, Any]) -> set[str]:
    """Return the types of the weights that config.json names, as safetensors has them."""
    text: Mapping[str, Any] = raw.get("text_config") or raw
    named = {text.get(key) or raw.get(key) for key in ("dtype", "torch_dtype")}
    return {WIDE[name] for name in WIDE.keys() & named} or {"BF16"}
