"""The lines of a batch: read, checked, and sorted so that neighbours share pages. Pure."""

import json
from collections.abc import Iterator
from typing import Any, cast

from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.chat.request.json_text import parse_json
from tidemill.cluster.edge.records.batches import StoredLine
from tidemill.cluster.edge.requests.json_body import check_json
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.workers.messages import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
LINES_MAX = 50_000
ERRORS_MAX = 100
CUSTOM_ID_CHARS_MAX = 512
SORT_KEY_BYTES = 16 << 10
RENDERED = ("model", "tools", "instructions", "messages", "input", "prompt")
"""The fields that a prompt begins with, in the order in which templates render them."""


class LineReader:
    """Reads the lines of a file that comes in pieces. `errors` are those of the API."""

    def __init__(self, endpoint: str) -> None:
        self.errors: list[dict[str, object]] = []
        self.count = 0
        self._endpoint = endpoint
        self._ids = set[str]()
        self._left = b""
        self._number = 0

    def feed(self, piece: bytes, *, is_last: bool = False) -> Iterator[StoredLine]:
        """Yield the lines that another piece completes, until there are too many errors."""
        *lines, self._left = (self._left + piece).split(b"\n")
        if is_last:
            lines.append(self._left)
        elif len(self._left) > BODY_BYTES_MAX:
            lines, self._left = [*lines, self._left], b""  # refused for its length
        for text in lines:
            self._number += 1
            if not text.strip() or len(self.errors) >= ERRORS_MAX:
                continue
            try:
                yield self._line(text)
            except RequestError as error:
                problem = {"code": error.code or "invalid_request", "message": str(error)}
                self.errors.append({**problem, "line": self._number, "param": error.param})

    def _line(self, text: bytes) -> StoredLine:
        self.count += 1
        if self.count > LINES_MAX:
            raise RequestError(
                f"a batch has at most {LINES_MAX:,} lines: make several", code="too_many_lines"
            )
        if len(text) > BODY_BYTES_MAX:
            raise RequestError(f"a line has at most {BODY_BYTES_MAX >> 20} MiB", code="line_too_long")
        check_json(text)
        try:
            found = cast("Any", parse_json(text.decode("utf-8-sig")))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"this line is no JSON: {error}", code="invalid_json_line") from None
        match found:
            case {"custom_id": str(name), "method": "POST", "url": str(url), "body": {**body}}:
                pass
            case _:
                form = '{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}'
                raise RequestError(f"a line has the form {form}", code="invalid_request")
        if url != self._endpoint:
            raise RequestError(f"url is not {self._endpoint}", param="url", code="invalid_url")
        if not 0 < len(name) <= CUSTOM_ID_CHARS_MAX or name in self._ids:
            raise RequestError(
                f"custom_id is missing, long or used by an earlier line: {name[:64]!r}",
                param="custom_id",
                code="duplicate_custom_id",
            )
        self._ids.add(name)
        return StoredLine(self._number, json.dumps(name), sort_key(body), json_bytes(body).decode())


def sort_key(body: dict[str, Any]) -> bytes:
    """Return what the prompt of a body begins with: equal beginnings of prompts have equal ones here."""
    return json_bytes([body.get(name) for name in RENDERED])[:SORT_KEY_BYTES]
