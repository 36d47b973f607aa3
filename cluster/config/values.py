"""The forms of values in the configuration file: bounds, units, and texts that stand for values. Pure."""

import json
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.settings import KV_EVENT_ENDPOINT

PORT_MAX = 65535

DEVICE = r"^(cpu|cuda(:[0-9]+)?)$"
SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([kmgtKMGT]([iI]?[bB]?)|[bB])?\s*$"
DURATION = r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)?\s*$"
NAME = {"type": "string", "minLength": 1}


def _size(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        parse_bytes(text)  # raises ValueError
    return text


def _duration(value: object) -> object:
    """Return seconds, from a number of them or a text like 50ms or 0.05s."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(DURATION, value)
    if match is None:
        raise ValueError(f"time {value!r} is not a duration: write it like 50ms, 0.05s or 0.05")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def _threads(value: object) -> object:
    """Return a number of threads, None for auto."""
    if value == "auto":
        return None
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def parse_object(value: object) -> object:
    """Return the object that a flag has as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        example = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        raise ValueError(f"is not a JSON object ({error}): write it like {example}") from None


def _check_endpoint(endpoint: str) -> str:
    if re.fullmatch(KV_EVENT_ENDPOINT, endpoint) is None:
        raise ValueError(
            f"is {endpoint!r}: write it like tcp://*:5557, tcp://collector:5557 or ipc:///tmp/kv"
        )
    return endpoint


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_amount(amount: float) -> float:
    if amount > 1 and not amount.is_integer():
        raise ValueError(f"is {amount:g}: Ray reserves a fraction below 1, or a whole number")
    return float(amount)


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0), AfterValidator(_check_amount)]
Duration = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": DURATION}, {"type": "number", "minimum": 0}]}),
]
Threads = Annotated[
    Count | None,
    BeforeValidator(_threads),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}, {"type": "null"}]}),
]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Size = Annotated[
    str,
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": SIZE}, {"type": "integer", "minimum": 0}]}),
]
Names = Annotated[
    tuple[Text, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [NAME, {"type": "array", "items": NAME, "minItems": 1}]}),
]
