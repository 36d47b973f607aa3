"""Download the files of a model from a place that fsspec can read: s3, gs, https and others.

A file is copied in blocks to a name that ends with `.part`, then renamed, so a download that broke off
goes on where it was. The versions of complete files (size and ETag) are kept beside them: a file that has
changed at its place is copied again.
"""

import fcntl
import hashlib
import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tidemill.workers.sources.names import ModelSource, SourceError

BLOCK_BYTES = 16 << 20
ATTEMPTS_MAX = 4
"""The attempts at one block."""

RETRY_S = 1.0
VERSIONS = ".versions.json"
LOCK = ".lock"

SUFFIXES = (".json", ".jinja", ".safetensors")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"
TEXTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OTHERS = (*TEXTS, MODULES, INDEX)
"""The files that are asked for by name where a place lists none, as web servers do not."""

POOLING = "1_Pooling/config.json"
"""The file in a folder below, where there is a modules.json."""

CHANGES = ("ETag", "etag", "LastModified", "mtime")
"""The names of the mark of a version, the best first; each kind of place has its own."""

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package that reads a scheme, for those that fsspec cannot read alone."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file: its path within its place, its size, and a text that changes with its content."""

    path: str
    num_bytes: int
    version: str


def download_files(source: ModelSource, offline: bool) -> Path:  # noqa: FBT001 - named at its caller
    """Return the folder with all files of the model. Raises SourceError and OSError."""
    folder = _folder(source)
    if offline:
        if not (folder / VERSIONS).exists():
            raise SourceError(f"{source.name} has not been downloaded: `tidemill serve` does it")
        return folder
    files = _open(source)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        remote = _list(files, source)
        kept: dict[str, str] = {}
        if (folder / VERSIONS).exists():
            kept = json.loads((folder / VERSIONS).read_text())
        for name, file in remote.items():
            if kept.get(name) != file.version or not (folder / name).exists():
                _copy(files, file, folder / name, source)
        for name in kept.keys() - remote.keys():
            (folder / name).unlink(missing_ok=True)
        written = folder / f"{VERSIONS}.new"
        written.write_text(json.dumps({name: file.version for name, file in remote.items()}))
        written.replace(folder / VERSIONS)
    return folder


def _folder(source: ModelSource) -> Path:
    cache = Path.home() / ".cache" / "tidemill" / "models"
    digest = hashlib.sha256(source.name.encode()).hexdigest()[:12]
    return (source.download_dir or cache) / f"{source.path.rpartition('/')[2]}-{digest}"


def _open(source: ModelSource) -> Any:  # noqa: ANN401 - a file system of fsspec
    try:
        fsspec: Any = import_module("fsspec")
        files: Any = fsspec.url_to_fs(source.name)[0]
    except ImportError as error:
        package = PACKAGES.get(source.scheme, "fsspec")
        raise SourceError(f"{source.name} needs the package {package}: pip install {package}") from error
    except ValueError as error:
        raise SourceError(f"{source.name}: {error}; use hf://, s3://, gs:// or https://") from error
    return files


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Let one process of this machine download into a folder at a time."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _list(files: Any, source: ModelSource) -> dict[str, RemoteFile]:  # noqa: ANN401 - see _open
    """Return the files to copy by their names in the folder. Raises SourceError without a config.json."""
    try:
        if source.scheme in {"http", "https"}:
            place, found = source.name, dict(_named(files, source.name))
        else:
            place = source.path
            entries: list[dict[str, Any]] = files.ls(source.path, detail=True, refresh=True)
            found = {
                entry["name"].rpartition("/")[2]: _file(entry)
                for entry in entries
                if entry["type"] == "file" and entry["name"].endswith(SUFFIXES)
            }
        if MODULES in found:
            with suppress(FileNotFoundError):
                found[POOLING] = _file(files.info(f"{place}/{POOLING}"))
    except FileNotFoundError:
        found = {}
    except Exception as error:  # each kind of place has errors of its own
        raise SourceError(f"{source.name} cannot be listed: {type(error).__name__}: {error}") from error
    if CONFIG not in found:
        raise SourceError(f"there is no {CONFIG} at {source.name}: give the folder with the model's files")
    return {name: file for name, file in found.items() if not name.startswith("consolidated")}


def _named(files: Any, place: str) -> Iterator[tuple[str, RemoteFile]]:  # noqa: ANN401 - see _open
    """Yield the files at a place that lists none. Raises FileNotFoundError for one that must be there."""
    yield CONFIG, _file(files.info(f"{place}/{CONFIG}"))
    weights = [WEIGHTS]
    for name in OTHERS:
        try:
            yield name, _file(files.info(f"{place}/{name}"))
        except FileNotFoundError:
            continue
        if name == INDEX:
            weight_map: dict[str, str] = json.loads(files.cat_file(f"{place}/{name}"))["weight_map"]
            weights = sorted(set(weight_map.values()))
    for name in weights:
        yield name, _file(files.info(f"{place}/{name}"))


def _file(entry: dict[str, Any]) -> RemoteFile:
    changed = next((str(entry[key]) for key in CHANGES if entry.get(key)), "")
    return RemoteFile(entry["name"], entry["size"], f"{entry['size']} {changed}")


def _copy(files: Any, file: RemoteFile, target: Path, source: ModelSource) -> None:  # noqa: ANN401
    digest = hashlib.sha256(file.version.encode()).hexdigest()[:12]
    target.parent.mkdir(exist_ok=True)
    part = target.with_name(f".{target.name}.{digest}.part")
    with part.open("ab") as out:
        while (start := out.tell()) < file.num_bytes:
            end = min(start + BLOCK_BYTES, file.num_bytes)
            out.write(_block(files, file, start, end, source))
            out.flush()
    part.replace(target)


def _block(files: Any, file: RemoteFile, start: int, end: int, source: ModelSource) -> bytes:  # noqa: ANN401
    """Return bytes [start, end) of a file. Raises SourceError after ATTEMPTS_MAX attempts."""
    attempt = 1
    while True:
        try:
            data: bytes = files.cat_file(file.path, start=start, end=end)
            if len(data) != end - start:
                raise SourceError(f"{len(data)} bytes came: {source.name} does not answer ranges")
        except Exception as error:  # each kind of place has errors of its own
            if attempt == ATTEMPTS_MAX:
                raise SourceError(
                    f"the download of {file.path} broke off after {start} of {file.num_bytes} bytes "
                    f"({type(error).__name__}: {error}): the same command goes on from there"
                ) from error
        else:
            return data
        attempt += 1
        time.sleep(RETRY_S)
