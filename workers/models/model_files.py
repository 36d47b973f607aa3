"""Reads the files of a model folder. Others wrote them, so anything can be in them."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any, cast

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.files import read_regular
from tidemill.workers.models.errors import ModelError

TEXT_BYTES_MAX = 256 << 20
"""The largest file that is read whole: a tokenizer.json has some 30 MB, an index of weights some 10 MB."""

ERROR_CHARS_MAX = 300


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Raise ModelError, in one line, for whatever reading or interpreting a file of a model raises. Expected
    errors pass."""
    try:
        yield
    except (TidemillError, FileNotFoundError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{path} cannot be used ({_line(error)}): download the model again") from error


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has raised this, which is no Exception then."""
    return type(error).__name__ == "PanicException"


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ModelError, and FileNotFoundError."""
    with reading(path):
        return read_regular(path, TEXT_BYTES_MAX).decode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError."""
    try:
        content: Any = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: --model takes a Hugging Face folder") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({_line(error)}): download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: download the model again")
    return cast("dict[str, Any]", content)


def eos_ids_of(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Return the ids that end an answer: those of generation_config.json, config.json and the
    tokenizer, which name different ones in many folders. Raises ModelError."""
    path = folder / "generation_config.json"
    text: Any = config.get("text_config")
    named: list[dict[str, Any]] = [config, text if isinstance(text, dict) else {}]
    named.append(read_json(path) if path.exists() else {})
    ids: set[int] = set()
    for given in named:
        found: Any = given.get("eos_token_id")
        with reading(path):
            ids |= set(map(index, [found] if isinstance(found, int) else found or ()))
    return frozenset(ids | _tokenizers_eos(folder))


def _tokenizers_eos(folder: Path) -> set[int]:
    """Return the id of the tokenizer's own end of a text, as far as its settings name one."""
    path, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not path.exists():
        return set()
    settings = read_json(path)
    with reading(path):
        eos: Any = settings.get("eos_token")
        text = cast("dict[str, Any]", eos).get("content") if isinstance(eos, dict) else eos
        decoder = cast("dict[str, Any]", settings.get("added_tokens_decoder") or {})
        added: list[dict[str, Any]] = [{"id": int(token), **about} for token, about in decoder.items()]
        if text and not added and vocabulary.exists():  # as transformers 5 saves them
            added = cast("list[dict[str, Any]]", read_json(vocabulary).get("added_tokens") or [])
        return {token["id"] for token in added if text and token["content"] == text}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {text[:ERROR_CHARS_MAX]}".removesuffix(": ")
