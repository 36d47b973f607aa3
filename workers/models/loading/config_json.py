"""Read config.json: a value, or an error in one line for what is missing or not supported."""

import math
from collections.abc import Mapping
from typing import Any, cast

from tidemill.workers.models.errors import ModelError

Raw = Mapping[str, Any]


def require(true: bool, problem: str) -> None:  # noqa: FBT001  the condition is the point
    """Raise ModelError if the condition is false."""
    if not true:
        raise ModelError(f"config.json: {problem}")


MOST: dict[str, int] = dict.fromkeys(
    ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts"), 2048
)
"""The largest numbers of parts that each have tensors. Other sizes are below SIZE_MAX."""

SIZE_MAX = 1 << 31


def size(raw: Raw, *keys: str) -> int:
    """Return the positive number under the first of `keys` that exists. Raises ModelError."""
    value = count(raw, *keys)
    require(value > 0, f"{' or '.join(keys)} is {_first(raw, keys)!r}: a positive number is needed")
    return value


def count(raw: Raw, *keys: str) -> int:
    """Return the number under the first of `keys` that exists, 0 if none does. Raises ModelError."""
    value, most = _first(raw, keys), min(MOST.get(key, SIZE_MAX) for key in keys)
    if value is None:
        return 0
    is_number = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    require(is_number and 0 <= value <= most, f"{' or '.join(keys)} is {value!r}: give 0 to {most}")
    return int(value)


def number(raw: Raw, key: str, default: float) -> float:
    """Return the number under `key`, `default` where it is missing or null. Raises ModelError."""
    value = raw.get(key)
    require(value is None or isinstance(value, int | float), f"{key} is {value!r}: a number is needed")
    found = default if value is None else float(value)
    require(math.isfinite(found), f"{key} is {value!r}: a finite number is needed")
    return found


def nested(raw: Raw, *keys: str) -> Raw:
    """Return the object under the first of `keys` that has one, an empty one if none does. Raises
    ModelError."""
    value: Any = next((raw[key] for key in keys if raw.get(key)), None) or {}
    require(isinstance(value, Mapping), f"{' or '.join(keys)} is {value!r}: an object is needed")
    return cast("Raw", value)


def _first(raw: Raw, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - JSON
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def require_silu(raw: Raw) -> None:
    act = raw.get("hidden_act", "silu")
    require(act == "silu", f"hidden_act {act!r}: only silu is supported")


def layer_kinds(raw: Raw, default: list[str], known: set[str]) -> list[str]:
    """Return `layer_types`, one for each layer, or `default`. Raises ModelError."""
    names: list[Any] = raw.get("layer_types") or default
    is_list = type(names) is list and all(isinstance(name, str) for name in names)
    require(is_list, "layer_types is no list of names")
    num_layers = size(raw, "num_hidden_layers")
    require(len(names) == num_layers, f"layer_types has {len(names)} entries for {num_layers} layers")
    require(set(names) <= known, f"layer_types has {sorted(set(names) - known)}: not supported")
    return names
