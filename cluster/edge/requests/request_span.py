"""The span of one request of a client: the parent of all that the cluster does for it."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import SpanKind, Tracer

from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.recent_requests import RequestIdentity, RequestRecord
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
    tracer: Tracer | None, identity: RequestIdentity, job: PreparedRequest, entry: RequestRecord
) -> Generator[PreparedRequest]:
    """The job as it goes on: its requests have this span for a parent. Without a tracer it stays as it is."""
    if tracer is None or not job.requests:
        yield job
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
        parent = traceparent(answering)
        requests = tuple(replace(request, trace_parent=parent) for request in job.requests)
        try:
            yield replace(job, requests=requests)
        finally:
            row = entry.row()
            for name, attribute in SPAN_ATTRIBUTES.items():
                value = row.get(name)
                if isinstance(value, str | int | float):
                    answering.set_attribute(attribute, value)
