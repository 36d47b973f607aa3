"""Sizes in bytes as text. Pure."""

import re
from decimal import Decimal

_PREFIXES = "kmgt"
_UNITS = (
    {"": 1, "b": 1}
    | {
        prefix + ending: 1024**power
        for power, prefix in enumerate(_PREFIXES, 1)
        for ending in ("", "i", "ib")
    }
    | {prefix + "b": 1000**power for power, prefix in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `512MiB`, `1.5g` or `4096`; `8GB` is decimal. Raises ValueError with examples."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"size {text!r} is not a number of bytes: write it like 512MiB, 8GiB, 8g or 1048576")
    return int(Decimal(match[1]) * unit)
