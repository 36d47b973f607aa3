"""Adds to /openapi.json what routes do not show: the errors' shape, streams, keys."""

from typing import Any, cast

from fastapi import FastAPI

from tidemill.cluster.edge.apis.messages import PATH as MESSAGES
from tidemill.cluster.edge.requests.usage import Json

EVENTS = "text/event-stream"
TEXT = "text/plain"

EVERYWHERE = {
    "400": "a field or a header is wrong: `param` names it, `message` has the fix",
    "401": "no API key, or none that is known here",
    "403": "for the keys of operators",
    "404": "there is no such thing",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "429": "too many requests: retry after `Retry-After` seconds",
    "500": "a bug, or a request that crashes workers",
    "503": "no worker can answer now: retry after `Retry-After` seconds",
}
"""Error statuses and their meanings."""

TEXTS: Json = {"type": "string"}
MAYBE: Json = {"type": ["string", "null"]}


def _object(**properties: Json) -> Json:
    """Return the schema of an object that has all of these."""
    return {"type": "object", "required": [*properties], "properties": properties}


ERROR = _object(error=_object(message=TEXTS, type=TEXTS, param=MAYBE, code=MAYBE))
ERROR_OF_MESSAGES = _object(type={"const": "error"}, error=_object(type=TEXTS, message=TEXTS))
"""An error in the shape of Anthropic's API."""


def _reply(*fields: str) -> Json:
    return {"type": "object", "required": list(fields)}


REPLIES: dict[str, Json] = {
    "/inference/v1/generate": _reply("request_id", "choices", "usage"),
    "/v1/chat/completions": _reply("id", "object", "created", "model", "choices", "usage"),
    "/v1/completions": _reply("id", "object", "created", "model", "choices", "usage"),
    MESSAGES: _reply("id", "type", "role", "model", "content", "stop_reason", "usage"),
    "/v1/embeddings": _reply("id", "object", "created", "model", "data", "usage"),
    "/v1/rerank": _reply("id", "model", "results", "usage"),
    "/v1/score": _reply("id", "object", "created", "model", "data", "usage"),
    "/v1/responses": _reply("id", "object", "created_at", "model", "output", "status"),
}
"""The replies of streaming endpoints when they do not stream."""

NOT_OURS = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> None:
    """Complete the OpenAPI document of `app`, which is made on first request in a fifth of a second."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(plain())
        return plain()  # the same document: FastAPI keeps it

    app.openapi = openapi


def _correct(document: dict[str, Any]) -> None:
    parts = cast("dict[str, dict[str, Any]]", document["components"])
    parts["schemas"] = {name: schema for name, schema in parts["schemas"].items() if name not in NOT_OURS}
    parts["schemas"] |= {"Error": ERROR, "MessagesError": ERROR_OF_MESSAGES}
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    for path, methods in cast("dict[str, dict[str, dict[str, Any]]]", document["paths"]).items():
        for operation in methods.values():
            responses: dict[str, Any] = operation["responses"]
            responses.pop("422", None)
            error = "MessagesError" if path.startswith(MESSAGES) else "Error"
            responses.update({status: _error(error, meaning) for status, meaning in EVERYWHERE.items()})
            if path in REPLIES:
                responses["200"]["content"] = {
                    "application/json": {"schema": REPLIES[path]},
                    EVENTS: {"schema": TEXTS},
                }
    document["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = {TEXT: {"schema": TEXTS}}


def _error(name: str, meaning: str) -> Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"description": meaning, "content": content}
