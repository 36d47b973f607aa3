"""Serve a GGUF file as a Hugging Face folder: links to the file, beside the texts that its metadata hold."""

import hashlib
import json
import re
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.workers.sources.gguf_families import config_of
from tidemill.workers.sources.gguf_header import GgufFile, read_header
from tidemill.workers.sources.gguf_tokenizer import Vocabulary
from tidemill.workers.sources.names import SourceError

SUFFIX = ".gguf"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""The files that are taken from the folder of the GGUF file if they are there."""


def shards_of(name: str) -> list[str]:
    """Return the names of all files of a model by that of one."""
    match = SHARD.fullmatch(name)
    if match is None:
        return [name]
    stem, _, count = match.groups()
    return [f"{stem}-{number:05}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]


def unpack(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of a GGUF file, which is written again each time: links and texts in the cache of
    this user. A folder belongs to one state of its files. Raises SourceError."""
    path = path.absolute()
    paths = [path.with_name(name) for name in shards_of(path.name)]
    files = [read_header(shard) for shard in paths]
    digest = hashlib.sha256(str(paths[0]).encode())
    for shard in paths:
        stat = shard.stat()
        digest.update(f" {stat.st_size} {stat.st_mtime_ns}".encode())
    cache = cache or Path.home() / ".cache" / "tidemill" / "gguf"
    folder = cache / f"{paths[0].stem}-{digest.hexdigest()[:12]}"
    beside = {name: path.with_name(name) for name in BESIDE if path.with_name(name).exists()}
    try:
        texts = _texts(files, path.parent)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise SourceError(f"{path} has damaged metadata ({error!r}): download it again") from error
    made = texts | beside | {shard.name: shard for shard in paths}
    try:
        for name, content in made.items():
            _replace(folder / name, content)
    except OSError as error:
        raise SourceError(f"{folder} cannot be written ({error}): give another --download-dir") from error
    return folder


def _texts(files: Sequence[GgufFile], folder: Path) -> dict[str, str]:
    """Return the texts by the names of their files, except those that `folder` has. Raises SourceError."""
    first = files[0]
    vocabulary = Vocabulary(str(first.path), first.metadata)
    config = config_of(first, frozenset(name for file in files for name in file.tensors))
    found: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": vocabulary.eos_ids()},
        "tokenizer_config.json": vocabulary.config(),
    }
    if not (folder / "tokenizer.json").exists():
        found["tokenizer.json"] = vocabulary.tokenizer_json()
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in found.items()}
    return texts | vocabulary.templates()


def _replace(target: Path, content: Path | str) -> None:
    """Make a link to a path, or write a text. A reader of the folder sees the old file or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        new = Path(made) / target.name
        if isinstance(content, Path):
            new.symlink_to(content)
        else:
            new.write_text(content)
        new.replace(target)
