"""Log lines of every process of a server: one format for people, one for machines. No prompt text, no
keys."""

import logging
import sys
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from traceback import format_tb
from typing import TextIO, cast

from pythonjsonlogger.json import JsonFormatter

from tidemill.cluster.observability.telemetry import Telemetry

OURS = "tidemill"
"""The parent of our loggers. Others are logged from warnings on, whatever the level."""

TEXT_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON_FIELDS = ("levelname", "name", "message", "process")
JSON_NAMES = {
    "levelname": "level",
    "name": "logger",
    "process": "pid",
    "timestamp": "ts",
    "exc_info": "error",
}

TENANT_BYTES = 8
LINES_KEPT = 1000

request_log = logging.getLogger("tidemill.requests")


def start_logs(telemetry: Telemetry, stream: TextIO | None = None, **always: str) -> None:
    """Write the log of this process to `stream` (default: stderr), in place of an earlier stream. `always`
    are fields of every line of JSON, for example the worker's name."""
    output = logging.StreamHandler(sys.stderr if stream is None else stream)
    output.setFormatter(
        JsonFormatter(list(JSON_FIELDS), rename_fields=JSON_NAMES, static_fields=always, timestamp=True)
        if telemetry.log_json
        else logging.Formatter(TEXT_FORM)
    )
    output.addFilter(_without_words)
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(telemetry.log_level.upper())


OF_REQUESTS = ("tidemill.cluster.edge", "tidemill.cluster.worker", "uvicorn", "asyncio", "grpc")
"""The loggers whose errors may be those of requests."""


def _without_words(record: logging.LogRecord) -> bool:
    """Leave out what the errors of requests say, which may be words of clients."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and record.name.startswith(OF_REQUESTS):
        record.exc_info, record.exc_text = None, _frames(error)
    return True


def _frames(error: BaseException) -> str:
    """Return the traceback of an error and its causes without their messages."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = "".join(format_tb(error.__traceback__))
    own = f"Traceback (most recent call last):\n{frames}{type(error).__name__}"
    inner: list[BaseException] = [] if cause is None else [cause]
    if isinstance(error, BaseExceptionGroup):
        inner += cast("BaseExceptionGroup[Exception]", error).exceptions
    return "\n\n".join([*map(_frames, inner), own])


class _Keeping(logging.Handler):
    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record).encode(errors="backslashreplace").decode())


@contextmanager
def keeping(lines: deque[str]) -> Generator[None]:
    """Copy the log of this process during the block to `lines`."""
    root, kept = logging.getLogger(), _Keeping(lines)
    kept.addFilter(_without_words)
    kept.setFormatter(logging.Formatter(TEXT_FORM))
    root.addHandler(kept)
    try:
        yield
    finally:
        root.removeHandler(kept)


def log_request(row: Mapping[str, object], tenant: str) -> None:
    """Log the end of a request. `row` is that of /cluster/requests: numbers, names and ids. Its list of cache
    diagnostics is left out."""
    if not request_log.isEnabledFor(logging.INFO):
        return
    fields = {name: value for name, value in row.items() if not (value is None or isinstance(value, list))}
    if tenant:
        fields["tenant"] = blake2b(
            tenant.encode(errors="surrogatepass"), digest_size=TENANT_BYTES
        ).hexdigest()
    request_log.info(
        "%s %s: %s + %s tokens, ttft %s, e2e %s, %s -> %s, %s",
        *(row.get(name) for name in ("request_id", "model", "prompt_tokens", "completion_tokens")),
        *(_seconds(row.get(name)) for name in ("ttft_s", "e2e_s")),
        *(row.get(name) or "-" for name in ("prefill", "decode", "finish")),
        extra=fields,
    )


def _seconds(value: object) -> str:
    return f"{value:.3f} s" if isinstance(value, float) else "-"
