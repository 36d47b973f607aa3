"""What requests meet whichever way they come: the models, who may ask, how much at once, measurements."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from opentelemetry.trace import Tracer

from tidemill.cluster.edge.requests.answers import Increment, answers
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.limits import EdgeLimits, InFlightLimit
from tidemill.cluster.edge.requests.models import EdgeModel, EdgeModels, ServedBackend
from tidemill.cluster.edge.requests.recent_requests import RecentRequests, RequestIdentity
from tidemill.cluster.edge.requests.request_span import traced
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.observability.logs import log_request

Parts = Mapping[str, Callable[[], object]]
"""By name; each is called on a thread, makes what JSON can have, and may raise TidemillError."""

ID_CHARS = 12
"""Of a random id: enough to tell requests of one name apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the edge takes from outside: time, ids, and seeds for the requests that bring none."""

    clock_s: Callable[[], float]  # monotonic
    unix_time_s: Callable[[], float]
    new_id: Callable[[], str]
    rng: Random
    tracer: Tracer | None = None  # None: nothing is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeContext:
    """HTTP and gRPC of one frontend have it in common."""

    models: EdgeModels
    keys: ApiKeys
    metrics: EdgeMetrics
    recent: RecentRequests
    limits: EdgeLimits
    open_answers: InFlightLimit
    sources: Sources
    parts: Parts

    async def answers(
        self, model: EdgeModel, job: PreparedRequest, asked: RequestIdentity
    ) -> AsyncGenerator[Increment]:
        """All choices of `job` as they grow, measured. Closing it cancels what still runs. Raises Overloaded,
        Unserved, RequestError."""
        job = _named(job, asked)
        with (
            self.open_answers.holding(len(job.requests)),
            self.metrics.watch(model.name, job.requests) as watch,
            self.recent.watch(asked, job) as story,
            traced(self.sources.tracer, asked, job, story) as going,
        ):
            async with aclosing(answers(model.service, model.tokenizer, going)) as increments:
                async for increment in increments:
                    watch.record(
                        increment.choice,
                        num_tokens=increment.growth.num_tokens,
                        finish=increment.growth.finish,
                        trace=increment.trace,
                    )
                    story.record(increment)
                    yield increment


def open_context(
    served: Sequence[ServedBackend],
    sources: Sources,
    *,
    metrics: EdgeMetrics | None = None,
    limits: EdgeLimits | None = None,
    keys: Sequence[ApiKey] = (),
    parts: Parts = MappingProxyType({}),
) -> EdgeContext:
    """With `keys`, only those who bring one may ask. `parts` are what the server tells of itself."""
    limits = EdgeLimits() if limits is None else limits
    return EdgeContext(
        models=EdgeModels(served, sources.new_id, sources.rng),
        keys=ApiKeys(keys, sources.clock_s),
        metrics=EdgeMetrics(sources.clock_s) if metrics is None else metrics,
        recent=RecentRequests(sources.clock_s, sources.unix_time_s, told=_log),
        limits=limits,
        open_answers=InFlightLimit(limits.answers_max, "answers"),
        sources=sources,
        parts=parts,
    )


def _named(job: PreparedRequest, asked: RequestIdentity) -> PreparedRequest:
    """Its requests are called after the client's, so that workers' log lines are found; clients may give one
    id twice, so they keep their own as well."""
    requests = tuple(
        replace(one, request_id=f"{asked.request_id}.{one.request_id[-ID_CHARS:]}") for one in job.requests
    )
    return replace(job, requests=requests)


def _log(row: Json, job: PreparedRequest) -> None:
    log_request(row, job.requests[0].tenant if job.requests else "")
