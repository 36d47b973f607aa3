"""Turns pydantic's errors about a client's fields into a RequestError that names the field and the fix."""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError

from tidemill.workers.messages import RequestError

Model = TypeVar("Model", bound=BaseModel)

FIXES = {
    "extra_forbidden": "there is no such parameter: leave it out",
    "json_invalid": "send a JSON object",
    "missing": "is needed",
    "model_attributes_type": "send a JSON object with content-type: application/json",
}


def request_error(problems: Sequence[Mapping[str, object]]) -> RequestError:
    """Return the first problem, with the field as a client writes it: `messages[0].role`."""
    problem = problems[0]
    position = cast("tuple[int | str, ...]", problem["loc"])
    kind = str(problem["type"])
    field = "" if kind == "json_invalid" else _path(position)
    reason = FIXES.get(kind, str(problem["msg"]).removeprefix("Value error, "))
    return RequestError(f"{field}: {reason}" if field else reason, param=field or None)


def checked(kind: type[Model], fields: object) -> Model:
    """Return the model of a client's fields. Raises RequestError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise request_error(problems_of(error)) from None


def problems_of(error: ValidationError, *position: str) -> list[dict[str, object]]:
    """Return the problems; `place` is where the fields are, if not at the top."""
    problems = error.errors(include_url=False, include_input=False)
    return [{**problem, "loc": (*position, *problem["loc"])} for problem in problems]


def _path(parts: Sequence[int | str]) -> str:
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(steps).removeprefix(".")
