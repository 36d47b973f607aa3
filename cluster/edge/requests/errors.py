"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

import math
from collections.abc import Callable, Mapping
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tidemill.cluster.edge.chat.request.validation import request_error
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Overloaded, Poisonous, RequestError

RETRY_AFTER_S = 1


def error_of(error: Exception) -> tuple[int, dict[str, object]]:
    """HTTP status and body. A bug tells clients nothing about itself."""
    match error:
        case RequestError():
            return error.status, _body(error.status, str(error), error.param, error.code)
        case Overloaded():
            return 429, _body(429, str(error), None, "overloaded")
        case Poisonous():
            return 500, _body(500, str(error), None, "poisonous")
        case TidemillError():
            return 503, _body(
                503, f"the request could not be served now, try again: {error}", None, "unserved"
            )
        case _:
            return 500, _body(500, "internal error: the server's log has the cause", None, "internal_error")


def headers_of(error: Exception) -> dict[str, str] | None:
    """When to ask again, in whole seconds, if that can help; and with what."""
    match error:
        case RequestError(status=401):
            return {"www-authenticate": "Bearer"}
        case RequestError() | Poisonous():
            return None
        case Overloaded():
            return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        case TidemillError():
            return {"retry-after": str(RETRY_AFTER_S)}
        case _:
            return None


def add_error_replies(app: FastAPI, count: Callable[[int], None]) -> None:
    """Make every error of `app` an OpenAI-shaped reply. `count` gets the status of each."""

    async def expected(_: Request, error: Exception) -> Response:
        status, body = error_of(error)
        count(status)
        return JSONResponse(body, status, headers_of(error))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await expected(_, request_error([_in_body(problem) for problem in error.errors()]))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path[:256]}: /docs lists what there is",
            405: f"{request.url.path[:256]} does not take {request.method[:16]}: /docs says what it takes",
        }.get(error.status_code, str(error.detail))
        count(error.status_code)
        return JSONResponse(_body(error.status_code, message, None, None), error.status_code, error.headers)

    app.add_exception_handler(TidemillError, expected)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, expected)


def _in_body(problem: Mapping[str, object]) -> dict[str, object]:
    """Its place, which starts with the word "body", as a place in the body."""
    return {**problem, "loc": cast("tuple[int | str, ...]", problem["loc"])[1:]}


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
