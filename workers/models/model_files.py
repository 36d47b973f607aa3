"""Reads the files of a model folder. Others wrote them, so anything can be in them."""

import json
from collections.abc import Generator
from contextlib import contextmanager
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


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {text[:ERROR_CHARS_MAX]}".removesuffix(": ")
