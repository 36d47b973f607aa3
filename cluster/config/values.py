"""The forms of values in the configuration file: bounds, units, and texts that stand for values. Pure."""

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from tidemill.workers.options import Count, Text

PORT_MAX = 65535

DEVICE = r"^(cpu|cuda(:[0-9]+)?)$"
NAME = {"type": "string", "minLength": 1}


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


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _listed(value: object) -> object:
    """Return the list that a flag has as JSON, which is how vLLM takes it."""
    match value:
        case [str(text)] if text.startswith("["):
            return json.loads(text)
        case _:
            return value


def _check_amount(amount: float) -> float:
    if amount > 1 and not amount.is_integer():
        raise ValueError(f"is {amount:g}: Ray reserves a fraction below 1, or a whole number")
    return float(amount)


TextList = Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_listed)]
Seconds = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0), AfterValidator(_check_amount)]
Threads = Annotated[
    Count | None,
    BeforeValidator(_threads),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}, {"type": "null"}]}),
]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Names = Annotated[
    tuple[Text, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [NAME, {"type": "array", "items": NAME, "minItems": 1}]}),
]
