"""Read the weights of a Hugging Face folder in the order of the model's requests, and digest what is read."""

import logging
from collections.abc import Callable, Collection, Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

from tidemill.kernels.linear.stored import Stored, has_nan
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading import encodings
from tidemill.workers.models.loading.dequantise import read_part
from tidemill.workers.models.loading.digests import Digests
from tidemill.workers.models.loading.encodings import Encoding, encoding_of, scheme_of, stored_by
from tidemill.workers.models.loading.quantise import floats_bytes, recipe_of
from tidemill.workers.models.loading.sharding import RankSlice
from tidemill.workers.models.loading.tensor_files import DTYPES, TensorFiles
from tidemill.workers.models.loading.weights import Weight

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class WeightsFolder:
    """The tensors of one folder by the names that the model knows.

    With `digests` every byte of what is read counts in the fingerprint, whatever the parts. Without, only the
    bytes of the requested parts are read.
    """

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        *,
        digests: bool,
        quantization: Mapping[str, Any] | None = None,
        quantize: Quantization | None = None,
    ) -> None:
        """Open the files and read their headers; `quantization` is the quantization_config of config.json,
        `quantize` what is made of a folder that has none.

        Raises ModelError when a file is missing or damaged, or weights are quantised in an unknown way.
        """
        self._folder = folder
        self._progress = progress
        self._scheme = scheme_of(quantization)
        if self._scheme is not None and quantize is not None:
            raise ModelError(
                f"{folder} is quantised already ({self._scheme.method}): leave out --quantization {quantize}"
            )
        if self._scheme is not None and self._scheme.inputs == "other":
            log.warning(
                "%s: its activations stay floats: those of all INT8 groups can be INT8, with a dynamic scale "
                "for each token",
                folder,
            )
        self._quantize: Quantization | None = quantize
        self.widened: list[str] = []
        """The tensors that have codes in the folder and are read as floats."""
        self._files = TensorFiles(folder)
        self._weights: dict[str, Weight] = {}
        self._encodings: dict[str, Encoding] = {}
        self._digests = Digests(wanted=digests)
        self._done_bytes = 0

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors in the folder."""
        return self._files.headers.keys()

    @property
    def dtypes(self) -> set[str]:
        """The types of all tensors that can be read."""
        return DTYPES.keys() & {header.dtype for header in self._files.headers.values()}

    def differ(self, name: str, other: str) -> bool:
        """Return whether the folder has both tensors, and they are not the same."""
        headers = self._files.headers
        if not {name, other} <= headers.keys():
            return False
        one, two = headers[name], headers[other]
        same = (one.dtype, one.shape) == (two.dtype, two.shape)
        return not same or any(
            first.view != second.view
            for first, second in zip(one.span.chunks(), two.span.chunks(), strict=True)
        )

    def check(self, weights: Mapping[str, Weight], ignored: Callable[[str], bool]) -> None:
        """Raise ModelError unless the folder holds exactly these tensors, in any encoding, except those
        `ignored`. Only they can be read."""
        headers = self._files.headers
        self._weights = dict(weights)
        self._encodings = {
            name: encoding_of(name, weight, self._scheme, headers) for name, weight in weights.items()
        }
        used = [name for encoding in self._encodings.values() for name in stored_by(encoding)]
        _complain("lacks", [name for name in used if name not in headers], self._folder)
        for name, encoding in self._encodings.items():
            encodings.check(encoding, weights[name].shape, self._scheme, headers)
        unused = headers.keys() - set(used)
        if self._scheme is not None:
            unused = {name for name in unused if not name.endswith(encodings.UNREAD)}
        _complain("has unexpected", [name for name in unused if not ignored(name)], self._folder)

    def read(self, name: str, part: RankSlice) -> Stored:
        """Return the part of a tensor, in memory of its own: as codes, or float32 if it is stored as float32
        or float16, else bfloat16."""
        encoding, shape = self._encodings[name], self._weights[name].shape
        recipe = recipe_of(self._weights[name], self._quantize)
        headers = {stored: self._files.headers[stored] for stored in stored_by(encoding)}
        with self._digests.reading(
            {stored: (f"{header.dtype} {header.shape}", header.span) for stored, header in headers.items()}
        ):
            found = read_part(encoding, shape, self._scheme, self._files.tensor, part, recipe)
        self._done_bytes += sum(header.span.num_bytes for header in headers.values())
        self._progress(self._done_bytes, self._files.all_bytes)
        if found.scales is None and encodings.has_codes(encoding):
            self.widened.append(name)
        for what, tensor in (("", found.codes), ("scales of ", found.scales)):
            if tensor is not None and has_nan(tensor):
                raise ModelError(
                    f"{self._folder}: the {what}tensor {name} holds NaN: download the model again"
                )
        return found

    def number(self, name: str, else_set: str) -> float:
        """Return a tensor of one positive number. Raises ModelError, which names the option that does without
        it."""
        header = self._files.headers[name]
        known = header.dtype in DTYPES and prod(header.shape) == 1
        value = float(self._files.tensor(name)) if known else inf
        if not 0 < value < inf:
            raise ModelError(f"{self._folder}: {name} is not one positive number: set {else_set}")
        return value

    def num_bytes(self, name: str, float_bytes: int) -> int:
        """Return the size of a tensor in memory, where floats take `float_bytes`."""
        encoding, weight = self._encodings[name], self._weights[name]
        coded = encodings.num_bytes(encoding, weight.shape, self._scheme, self._files.headers)
        return coded or floats_bytes(weight, self._quantize, float_bytes)

    def fingerprint(self, config: str) -> str:
        """Return the digest of `config` and of every tensor read so far, independent of order and files."""
        return self._digests.fingerprint(f"{self._scheme}\n{config}")


def _complain(what: str, names: Collection[str], folder: Path) -> None:
    if names:
        shown, more = sorted(set(names))[:3], len(names) - 3
        listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        raise ModelError(
            f"{folder} {what} {'tensor' if len(names) == 1 else 'tensors'} {listed}: "
            "the weights and config.json belong to different models"
        )
