"""gRPC errors: a status, a message for people, and trailing metadata for programs."""

from typing import cast

import grpc

from tidemill.cluster.edge.requests.errors import error_of, headers_of

PARAM_METADATA = "tidemill-param"
CODE_METADATA = "tidemill-code"
RETRY_METADATA = "retry-after"

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status by the error's HTTP status; others are INTERNAL."""

Metadata = tuple[tuple[str, str], ...]


def refusal_of(error: Exception) -> tuple[int, grpc.StatusCode, str, Metadata]:
    """Return the HTTP status that counts the error, its gRPC status, the message, and the trailing
    metadata."""
    status, body = error_of(error)
    fields = cast("dict[str, str | None]", body["error"])
    metadata = {
        PARAM_METADATA: fields["param"],
        CODE_METADATA: fields["code"],
        RETRY_METADATA: (headers_of(error) or {}).get("retry-after"),
    }
    return (
        status,
        CODES.get(status, grpc.StatusCode.INTERNAL),
        fields["message"] or "",
        tuple((name, value) for name, value in metadata.items() if value is not None and _is_plain(value)),
    )


def _is_plain(value: str) -> bool:
    """Return whether metadata can carry the text."""
    return value.isascii() and value.isprintable()
