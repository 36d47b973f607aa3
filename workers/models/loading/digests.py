"""The digests of tensors, by which page stores tell models apart."""

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import xxhash

from tidemill.workers.models.loading.tensor_files import Span

Tensors = Mapping[str, tuple[str, Span]]
"""Tensors by their names, each a text for its type and shape, and its bytes."""


class Digests:
    """Digests each tensor once, on a thread and while it is read: its bytes come from the disk once."""

    def __init__(self, *, wanted: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "digests") if wanted else None
        self._found: dict[str, str] = {}

    @contextmanager
    def reading(self, tensors: Tensors) -> Generator[None]:
        """Digest tensors, if that is wanted, while the body reads them. Then free their memory."""
        digesting = self._thread.submit(self._digest, tensors) if self._thread else None
        yield
        if digesting is not None:
            digesting.result()
        for _, span in tensors.values():
            span.drop()

    def fingerprint(self, config: str) -> str:
        """Return the digest of `config` and of every tensor read so far, independent of order and files."""
        assert self._thread is not None
        digest = xxhash.xxh3_128("\n".join(map(" ".join, sorted(self._found.items()))).encode())
        digest.update(f"\n{config}".encode())
        return digest.hexdigest()

    def _digest(self, tensors: Tensors) -> None:
        for name in tensors.keys() - self._found.keys():
            header, span = tensors[name]
            digest = xxhash.xxh3_128(f"{header}\n".encode())
            for chunk in span.chunks():
                digest.update(chunk.view)
                chunk.drop()
            self._found[name] = digest.hexdigest()
