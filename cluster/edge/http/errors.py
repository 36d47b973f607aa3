"""Turns every error of the application into a reply of the shape of its API."""

from collections.abc import Callable, Mapping
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.apis.messages import PATH as MESSAGES
from tidemill.cluster.edge.apis.messages import error_reply
from tidemill.cluster.edge.chat.request.validation import request_error
from tidemill.cluster.edge.requests.errors import error_body, error_of, headers_of
from tidemill.kvstore.errors import TidemillError

MODELS = "/v1/models"


class JsonReply(JSONResponse):
    """A reply that can be sent whatever texts it repeats."""

    def render(self, content: object) -> bytes:
        return json_bytes(content)


def shaped(scope: Scope, status: int, body: dict[str, object]) -> dict[str, object]:
    """Return an error in the shape of the API of this path, of which two have models."""
    path: str = scope["path"]
    has_version = any(name == b"anthropic-version" for name, _ in scope["headers"])
    is_theirs = path.startswith(MESSAGES) or (path.startswith(MODELS) and has_version)
    return error_reply(status, body) if is_theirs else body


def add_error_replies(app: FastAPI, count: Callable[[int], None]) -> None:
    """Make every error of `app` a reply. `count` receives the status of each."""

    async def expected(request: Request, error: Exception) -> Response:
        status, body = error_of(error)
        count(status)
        return JsonReply(shaped(request.scope, status, body), status, headers_of(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await expected(request, request_error([_in_body(problem) for problem in error.errors()]))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path[:256]}: /docs lists what there is",
            405: f"{request.url.path[:256]} does not take {request.method[:16]}: /docs lists its methods",
        }.get(error.status_code, error.detail)
        count(error.status_code)
        body = error_body(error.status_code, message, None, None)
        body = shaped(request.scope, error.status_code, body)
        return JsonReply(body, error.status_code, error.headers)

    app.add_exception_handler(TidemillError, expected)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, expected)


def _in_body(problem: Mapping[str, object]) -> dict[str, object]:
    """Return the problem with its location in the body, without the leading word "body"."""
    return {**problem, "loc": cast("tuple[int | str, ...]", problem["loc"])[1:]}
