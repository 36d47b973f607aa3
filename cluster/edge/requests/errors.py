"""Errors in the shape of OpenAI: `{"error": {"message", "type", "param", "code"}}`."""

import math

from tidemill.cluster.quotas.edge_quotas import LimitReached
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Overloaded, Poisonous, RequestError

RETRY_AFTER_S = 1


def error_of(error: Exception) -> tuple[int, dict[str, object]]:
    """Return the HTTP status and the body. A bug reveals nothing about itself."""
    match error:
        case RequestError():
            return error.status, error_body(error.status, str(error), error.param, error.code)
        case LimitReached():
            return 429, error_body(429, str(error), None, "rate_limit_exceeded")
        case Overloaded():
            return 429, error_body(429, str(error), None, "overloaded")
        case Poisonous():
            return 500, error_body(500, str(error), None, "poisonous")
        case TidemillError():
            return 503, error_body(
                503, f"the request could not be served now, try again: {error}", None, "unserved"
            )
        case _:
            return 500, error_body(
                500, "internal error: the server's log has the cause", None, "internal_error"
            )


def headers_of(error: Exception) -> dict[str, str] | None:
    """Return the Retry-After header in whole seconds, and others, if a retry can help."""
    match error:
        case RequestError(status=401):
            return {"www-authenticate": "Bearer"}
        case RequestError() | Poisonous():
            return None
        case Overloaded():
            return {"retry-after": str(max(1, math.ceil(error.retry_after_s))), **_limit_headers(error)}
        case TidemillError():
            return {"retry-after": str(RETRY_AFTER_S)}
        case _:
            return None


def _limit_headers(error: Overloaded) -> dict[str, str]:
    """Return the headers of OpenAI for a limit a minute that a key has reached."""
    if not isinstance(error, LimitReached) or error.limit is None:
        return {}
    values = {"limit": str(error.most), "remaining": "0", "reset": f"{error.retry_after_s:.3f}s"}
    return {f"x-ratelimit-{name}-{error.limit}": value for name, value in values.items()}


def error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
