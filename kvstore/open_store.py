"""From the text of an option to an open page store."""

import shutil
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.file_store import FileStore
from tidemill.kvstore.memory_store import MemoryStore
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.store import PageStore

_FORMS = "memory:?size=1GiB or file:///path?size=8GiB"
_MEMORY_BYTES = 1 << 30
_FILE_BYTES_MAX = 8 << 30


def open_store(url: str) -> PageStore:
    """`memory:`, `file:///path?size=8GiB` or a bare path. Raises StoreError that names the fix.

    Without a size, memory is 1 GiB, and files are 8 GiB or half of their file system, whichever is less.
    """
    parts = urlsplit(url)
    kind = parts.scheme or (url if url in {"memory", "mooncake"} else "file")
    if kind == "mooncake":
        raise StoreError(f"store {url}: mooncake is not part of this version: use file:///path?size=8GiB")
    if kind not in {"memory", "file"}:
        raise StoreError(f"store {url}: there is no store {kind!r}: use {_FORMS}")
    size_bytes = _size_bytes(url, parts.query)
    if kind == "memory":
        return MemoryStore(_MEMORY_BYTES if size_bytes is None else size_bytes)
    if parts.netloc or parts.fragment or not parts.path:
        raise StoreError(f"store {url}: a folder is written with three slashes: file:///path?size=8GiB")
    folder = Path(unquote(parts.path) if parts.scheme else parts.path)
    return FileStore(folder, _default_bytes(folder) if size_bytes is None else size_bytes)


def _size_bytes(url: str, query: str) -> int | None:
    options = parse_qs(query, keep_blank_values=True)
    sizes = options.pop("size", [])
    if options or len(sizes) > 1:
        raise StoreError(f"store {url}: its one option is size: use {_FORMS}")
    try:
        return parse_bytes(sizes[0]) if sizes else None
    except ValueError as error:
        raise StoreError(f"store {url}: {error}") from error


def _default_bytes(folder: Path) -> int:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return min(_FILE_BYTES_MAX, shutil.disk_usage(there).total // 2)
