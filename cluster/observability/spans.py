"""Spans of a request as all processes make them. What exports them is in otel.py, which is loaded on demand.

    frontend   request |------------------------------------------------------------------------|
    frontend     route |-|
    frontend              prefill |-----------------------|   decode |--------------------------|
    prefill-0               produce |-wait-|-compute-|-publish-|
    decode-0                fetch ahead |------------------|    generate |-wait-|-fetch-|-tail-|-stream-|

A parent is named by its W3C traceparent, which travels in `Request.trace_parent`.
"""

import asyncio
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Protocol, cast

from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Provenance

Attributes = Mapping[str, str | int | float | Sequence[str]]

TRACE_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

BACKEND = "tidemill.cluster.observability.otel:open_tracer"


class NoTracing(TidemillError):
    """Traces are wanted, and cannot be sent."""


class Span(Protocol):
    @property
    def trace_parent(self) -> str:
        """Of what happens inside of it, in whatever process."""
        ...

    def set_attributes(self, attributes: Attributes) -> None: ...

    def event(self, name: str) -> None:
        """Something happens now."""
        ...

    def parts(self, parts: Iterable[tuple[str, float]]) -> None:
        """What it consisted of so far: spans inside of it, one after the other from its start, with their
        seconds. Those that took no time are left out."""
        ...

    def part_since(self, name: str, seconds: float) -> None:
        """What has happened inside of it since so many seconds after its start, to this moment."""
        ...

    def end(self, error: str | None = None) -> None:
        """Once: what is told after it does not count."""
        ...


class Tracer(Protocol):
    """Of one process. Starting and ending spans costs microseconds; they are sent on another thread."""

    def start(self, name: str, trace_parent: str, attributes: Attributes) -> Span: ...

    def close(self) -> None:
        """Send what there is; may take seconds."""
        ...


def tracer_of(telemetry: Telemetry, process: str) -> Tracer | None:
    """Of this process, `frontend` or a worker's name; None where nothing is traced. Raises NoTracing."""
    if telemetry.traces_url is None:
        return None
    try:
        backend = resolve_name(BACKEND)
    except ImportError as error:
        raise NoTracing(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'tidemill[otel]'"
        ) from error
    return cast("Tracer", backend(telemetry.traces_url, process))


@contextmanager
def tracing(telemetry: Telemetry, process: str) -> Generator[Tracer | None]:
    """The same for the length of a block; what there is has been sent at its end."""
    tracer = tracer_of(telemetry, process)
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.close()


def parent_of(text: str | None) -> str:
    """A client's traceparent; empty if it is none."""
    return text if text is not None and TRACE_PARENT.fullmatch(text) else ""


@contextmanager
def span(tracer: Tracer, name: str, trace_parent: str, **attributes: str | float) -> Generator[Span]:
    """From now to the end of the block, with what ended it."""
    started = tracer.start(name, trace_parent, attributes)
    try:
        yield started
    except (GeneratorExit, asyncio.CancelledError):  # nobody wanted more of it
        started.set_attributes({"tidemill.cancelled": True})
        started.end()
        raise
    except BaseException as error:
        started.end(type(error).__name__)
        raise
    else:
        started.end()


def found(provenance: Provenance, page_tokens: int = 0) -> dict[str, int]:
    """Attributes: where a prompt came from."""
    attributes = {
        "tidemill.hit_depth_tokens": provenance.reused_tokens + provenance.fetched_tokens,
        "tidemill.reused_tokens": provenance.reused_tokens,
        "tidemill.fetched_tokens": provenance.fetched_tokens,
        "tidemill.computed_tokens": provenance.computed_tokens,
    }
    if page_tokens:
        attributes["tidemill.hit_pages"] = attributes["tidemill.hit_depth_tokens"] // page_tokens
        attributes["tidemill.fetched_pages"] = provenance.fetched_tokens // page_tokens
    return attributes
