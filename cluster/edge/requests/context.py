"""State shared by the HTTP and gRPC servers: models, API keys, limits, metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Protocol

from opentelemetry.trace import Tracer

from tidemill.cluster.edge.records.database import Database, DatabaseSettings
from tidemill.cluster.edge.records.store import Records
from tidemill.cluster.edge.requests.answers import Increment, answer
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import EdgeModel, EdgeModels, ServedBackend
from tidemill.cluster.edge.requests.recent_requests import RecentRequests, RequestIdentity
from tidemill.cluster.edge.requests.request_span import traced
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.cluster.listener import InFlightLimit
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.edge_samples import EdgeSamples
from tidemill.cluster.metrics.history import History
from tidemill.cluster.observability.logs import log_request
from tidemill.workers.inbox import Emit, Pause

Parts = Mapping[str, Callable[[], object]]
"""The parts of a support bundle by name. Each is called on a thread, returns JSON data, and may raise
TidemillError."""

PATIENT_S_MAX = 86_400.0

ID_CHARS = 12
"""The characters of a random id: enough to tell requests of one name apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Outside inputs of the edge: time, ids, and seeds for requests without one."""

    clock_s: Callable[[], float]  # monotonic
    unix_time_s: Callable[[], float]
    new_id: Callable[[], str]
    rng: Random
    tracer: Tracer | None = None  # None: no tracing


@dataclass(slots=True)
class StopReason:
    """The reason that open answers get when the server stops. `is_patient`: they have any time to end."""

    text: str = "this server stops"
    is_patient: bool = False


class EdgeGroup(Protocol):
    """The edges behind one port, of which this is one."""

    async def samples(self) -> EdgeSamples:
        """Return the sums of all edges' own metrics, also of those that have ended, as far as they are
        known."""
        ...

    async def rows(self) -> list[Json]:
        """Return the latest requests of all edges, the newest first. Raises Unserved."""
        ...

    async def open_answers(self) -> int:
        """Return the number of answers in progress on all edges. Raises Unserved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeContext:
    """The shared state of one edge's HTTP and gRPC servers. `group` is None where one edge has the port,
    `records` where it has no database."""

    models: EdgeModels
    keys: ApiKeys
    metrics: EdgeMetrics
    recent: RecentRequests
    limits: EdgeLimits
    open_answers: InFlightLimit
    sources: Sources
    parts: Parts
    stop_reason: StopReason = field(default_factory=StopReason)
    history: History = field(default_factory=History)
    group: EdgeGroup | None = None
    records: Records | None = None

    def shutdown_s_max(self) -> float:
        """Return the time that open answers have when the server stops now."""
        return PATIENT_S_MAX if self.stop_reason.is_patient else self.limits.shutdown_s_max

    async def answer(
        self, model: EdgeModel, job: PreparedRequest, identity: RequestIdentity, emit: Emit[Increment]
    ) -> None:
        """Emit all choices of `job` as they grow, with metrics. Cancelling this cancels the running ones.
        Raises Overloaded, Unserved, RequestError."""
        job = _named(job, identity)
        async with self.keys.answering(identity.key, UsageCounter(job).num_prompt_tokens()) as limited:
            with (
                self.open_answers.holding(len(job.requests), identity.client),
                self.metrics.watch(model.name, job.requests) as watch,
                traced(self.sources.tracer, identity, job) as (going, describe),
                self.recent.watch(identity, going, describe) as entry,
            ):
                if limited is not None:
                    limited.generated = entry.num_generated

                def take(increment: Increment) -> Pause | None:
                    watch.record(
                        increment.choice,
                        num_tokens=increment.growth.num_tokens,
                        finish=increment.growth.finish,
                        trace=increment.trace,
                    )
                    entry.record(increment)
                    return emit(increment)

                await answer(model.service, model.tokenizer, going, take)


def open_context(
    served: Sequence[ServedBackend],
    sources: Sources,
    *,
    metrics: EdgeMetrics | None = None,
    limits: EdgeLimits | None = None,
    keys: Sequence[ApiKey] = (),
    parts: Parts = MappingProxyType({}),
    group: EdgeGroup | None = None,
) -> EdgeContext:
    """Return the context of an edge. With `keys`, only clients with a key are admitted. `parts` are those of
    support bundles."""
    limits = EdgeLimits() if limits is None else limits
    return EdgeContext(
        models=EdgeModels(served, sources.new_id, sources.rng),
        keys=ApiKeys(keys, sources.clock_s),
        metrics=EdgeMetrics(sources.clock_s) if metrics is None else metrics,
        recent=RecentRequests(sources.clock_s, sources.unix_time_s, on_end=_log),
        limits=limits,
        open_answers=InFlightLimit(limits.answers_max, "answers"),
        sources=sources,
        parts=parts,
        group=group,
    )


def with_database(context: EdgeContext, database: DatabaseSettings | None) -> EdgeContext:
    """Return the context with the records of a database, if there is one."""
    if database is None:
        return context
    unix_time_s = context.sources.unix_time_s
    records = Records(Database(database), database.ttl_s, unix_time_s, context.keys.limits_of)
    return replace(context, records=records)


def _named(job: PreparedRequest, identity: RequestIdentity) -> PreparedRequest:
    """Return the job with the client's id in front of its requests' ids, so that workers' log lines can be
    found. Clients may repeat an id, so requests keep their own as well."""
    requests = tuple(
        replace(request, request_id=f"{identity.request_id}.{request.request_id[-ID_CHARS:]}")
        for request in job.requests
    )
    return replace(job, requests=requests)


def _log(row: Json, job: PreparedRequest) -> None:
    log_request(row, job.requests[0].tenant if job.requests else "")
