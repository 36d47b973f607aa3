"""Read config.json: a value, or an error in one line for what is missing or not supported."""

from collections.abc import Mapping
from typing import Any

from tidemill.workers.models.errors import ModelError

Raw = Mapping[str, Any]


def require(true: bool, problem: str) -> None:  # noqa: FBT001  the condition is the point
    """Raise ModelError if the condition is false."""
    if not true:
        raise ModelError(f"config.json: {problem}")


def size(raw: Raw, *keys: str) -> int:
    """Return the positive number under the first of `keys` that exists. Raises ModelError."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), None)
    require(
        isinstance(value, int) and value > 0, f"{' or '.join(keys)} is {value!r}: a positive number is needed"
    )
    assert isinstance(value, int)
    return value


def number(raw: Raw, key: str, default: float) -> float:
    """Return the number under `key`, `default` where it is missing or null."""
    value = raw.get(key)
    return default if value is None else float(value)


def require_silu(raw: Raw) -> None:
    act = raw.get("hidden_act", "silu")
    require(act == "silu", f"hidden_act {act!r}: only silu is supported")


def layer_kinds(raw: Raw, default: list[str], known: set[str]) -> list[str]:
    """Return `layer_types`, one for each layer, or `default`. Raises ModelError."""
    names: list[str] = raw.get("layer_types") or default
    num_layers = size(raw, "num_hidden_layers")
    require(len(names) == num_layers, f"layer_types has {len(names)} entries for {num_layers} layers")
    require(set(names) <= known, f"layer_types has {sorted(set(names) - known)}: not supported")
    return names
