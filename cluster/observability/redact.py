"""Remove secrets from a text: keys, passwords, tokens between processes. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import cast

REMOVED = "[removed]"

_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), ""),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{4,}"), r"\1"),
    (re.compile(r"\b(?:sk|hf)[-_][A-Za-z0-9_-]{6,}"), ""),
    # user:password@ in a URL
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@"), r"\1"),
    # NAME_OF_A_SECRET=value, "api_key": "value", --api-key value
    (
        re.compile(
            r"(?i)((?:api[_-]?key|auth[_-]?token|access[_-]?token|secret[_-]?key|password|passwd|token|secret)"
            r"""["']?(?:\s*[=:]\s*|\s+(?=["']))["']?)[^\s"',;&}\]]{4,}"""
        ),
        r"\1",
    ),
    (re.compile(r"(?i)(--api-key(?:\s+|=))\S+"), r"\1"),
    # digests of keys, and the ids by which Ray's processes authenticate
    (re.compile(r"\b[0-9a-fA-F]{64,}\b"), ""),
)


def without_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Return the text without secrets. `known` are secrets that are removed wherever they occur."""
    for secret in sorted(filter(None, known), key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    for pattern, kept in _PATTERNS:
        text = pattern.sub(kept + REMOVED, text)
    return text


def plain(value: object) -> object:
    """Return settings as JSON, without secrets."""
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            named = cast("Mapping[object, object]", value)
            return {str(name): plain(item) for name, item in named.items()}
        case frozenset():
            return plain(sorted(map(str, cast("frozenset[object]", value))))
        case Sequence() if not isinstance(value, str | bytes):
            return [plain(item) for item in cast("Sequence[object]", value)]
        case _ if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return without_secrets(str(value))
