"""The span of one request of a client: the parent of all that the cluster does for it."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import SpanKind, Tracer

from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.recent_requests import RequestIdentity
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.observability.spans import span, traceparent

SPAN_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "attempts": "tidemill.attempts",
    "cache_reason": "tidemill.cache.reason",
    "cache_missed_tokens": "tidemill.cache.missed_tokens",
    "prefill": "tidemill.prefill",
    "decode": "tidemill.decode",
}
"""The span attributes of a row of /cluster/requests, by the names of OpenTelemetry where it has some."""


@contextmanager
def traced(
    tracer: Tracer | None, identity: RequestIdentity, job: PreparedRequest
) -> Generator[tuple[PreparedRequest, Callable[[Json], None] | None]]:
    """The job as it goes on, whose requests have this span for a parent, and a function that describes the
    span by the row of the ended request. Without a tracer the job stays as it is."""
    if tracer is None or not job.requests:
        yield job, None
        return
    named = {
        "gen_ai.request.model": identity.model,
        "gen_ai.request.id": identity.request_id,
        "gen_ai.response.id": identity.reply_id,
        "tidemill.choices": len(job.requests),
    }
    with span(
        tracer, SpanKind.SERVER, f"request {identity.kind}", job.requests[0].trace_parent, named
    ) as answering:

        def describe(row: Json) -> None:
            for name, attribute in SPAN_ATTRIBUTES.items():
                value = row.get(name)
                if isinstance(value, str | int | float):
                    answering.set_attribute(attribute, value)

        parent = traceparent(answering)
        requests = tuple(replace(request, trace_parent=parent) for request in job.requests)
        yield replace(job, requests=requests), describe
