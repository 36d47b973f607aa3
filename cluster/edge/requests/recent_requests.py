"""The latest requests of this edge and their routes: a bounded ring without any text."""

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import FastAPI, Query

from tidemill.cluster.edge.cache_misses import first_reason, missed_tokens
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.workers.messages import RequestError, Trace

RECENT_MAX = 200

DIAGNOSTICS = "cache_diagnostics"
"""The field of a row with the reasons for computing tokens, with the names of tenants: it is not logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """The ids of a request. `reply_id` is the `id` of its answer; the answers of a `client` share limits.
    `key` is None without API keys."""

    request_id: str
    reply_id: str
    model: str
    kind: str
    client: str = ""
    key: ApiKey | None = None


class RecentRequests:
    """The newest `size` requests, including running ones."""

    def __init__(
        self,
        clock_s: Callable[[], float],
        unix_time_s: Callable[[], float],
        size: int = RECENT_MAX,
        on_end: Callable[[Json, PreparedRequest], None] | None = None,
    ) -> None:
        """`on_end` is called with each request that has ended."""
        self._on_end = on_end
        self._clock_s = clock_s
        self._unix_time_s = unix_time_s
        self._ring: deque[RequestRecord | Json] = deque(maxlen=size)

    @contextmanager
    def watch(
        self,
        identity: RequestIdentity,
        job: PreparedRequest,
        describe: Callable[[Json], None] | None = None,
    ) -> Generator["RequestRecord"]:
        """Follow one request to the end of the block; `describe` then gets its row."""
        entry = RequestRecord(identity, job, self._clock_s, self._unix_time_s())
        self._ring.appendleft(entry)
        try:
            yield entry
        except Exception as error:
            entry.error = type(error).__name__
            raise
        finally:
            entry.end()
            row = entry.row()
            if entry in self._ring:  # the prompt's tokens are not kept beyond its end
                self._ring[self._ring.index(entry)] = row
            if describe is not None:
                describe(row)
            if self._on_end is not None:
                self._on_end(row, job)

    def rows(self) -> list[Json]:
        """Return the rows, newest first."""
        return [entry.row() if isinstance(entry, RequestRecord) else entry for entry in self._ring]


class RequestRecord:
    """The progress of one request."""

    def __init__(
        self,
        identity: RequestIdentity,
        job: PreparedRequest,
        clock_s: Callable[[], float],
        started_unix_s: float,
    ) -> None:
        self._asked = identity
        self._choices = len(job.requests)
        self._tally = UsageCounter(job)
        self._clock_s = clock_s
        self._started_unix_s = started_unix_s
        self._start_s = clock_s()
        self._first_s: float | None = None
        self._first_tokens = 0
        self._last_s = self._start_s
        self._finishes: dict[int, str] = {}
        self._trace: Trace | None = None
        self._ended = False
        self.error: str | None = None

    def record(self, increment: Increment) -> None:
        self._last_s = self._clock_s()
        if self._first_s is None and increment.growth.num_tokens:
            self._first_s = self._last_s
            self._first_tokens = increment.growth.num_tokens
        if increment.choice == 0:  # after a loss, the route of the last attempt
            self._trace = increment.trace
        finish = increment.growth.finish
        if finish is not None:
            self._finishes[increment.choice] = finish
        self._tally.record(increment)

    def num_generated(self) -> int:
        """Return the tokens of all answers so far."""
        return self._tally.num_generated

    def end(self) -> None:
        self._ended = True

    def row(self) -> Json:
        """Return the row. `finish` is null while the request runs. The prompt's tokens are counted as in
        `usage`; the workers are those of the first choice's last attempt."""
        usage, trace = self._tally.usage(diagnoses=False), self._trace
        misses = self._tally.misses()
        return {
            "request_id": self._asked.request_id,
            "id": self._asked.reply_id,
            "model": self._asked.model,
            "kind": self._asked.kind,
            "started_unix_s": self._started_unix_s,
            "choices": self._choices,
            "finish": self._finish(),
            "error": self.error,
            "attempts": trace.attempts if trace else 0,
            "prefill": trace.prefill if trace else None,
            "decode": trace.decode if trace else None,
            "prefill_depth": trace.produced.depth if trace and trace.produced else None,
            "prefill_times": asdict(trace.produced.provenance.times) if trace and trace.produced else None,
            "decode_times": asdict(trace.provenance.times) if trace else None,
            "cache_reason": first_reason(misses) if trace else None,
            "cache_missed_tokens": missed_tokens(misses),
            DIAGNOSTICS: self._tally.operator_diagnostics(),
            **usage,
            "ttft_s": None if self._first_s is None else self._first_s - self._start_s,
            "e2e_s": self._last_s - self._start_s if self._ended else None,
            "tokens_per_s": self._tokens_per_s(usage["completion_tokens"]),
        }

    def _finish(self) -> str | None:
        if self.error is not None:
            return "error"
        if len(self._finishes) == self._choices:
            return ", ".join(sorted(set(self._finishes.values())))
        return "abort" if self._ended else None

    def _tokens_per_s(self, completion_tokens: object) -> float | None:
        """Return the rate of the tokens after the first ones; None for fewer than two times."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        assert isinstance(completion_tokens, int)
        return (completion_tokens - self._first_tokens) / (self._last_s - self._first_s)


Rows = Callable[[], list[Json]] | Callable[[], Awaitable[list[Json]]]


def add_recent_routes(app: FastAPI, rows: Rows) -> None:
    """Add GET /cluster/requests and one below it. `rows` returns the latest ones, newest first."""

    async def latest() -> list[Json]:
        found = rows()
        return found if isinstance(found, list) else await found

    async def requests(limit: Annotated[int, Query(ge=1, le=RECENT_MAX)] = RECENT_MAX) -> Json:
        """Return the latest requests at this port, newest first: workers, origin of the prompt's tokens,
        speed, end. No text."""
        return {"requests": (await latest())[:limit]}

    async def request(request_id: str) -> Json:
        """Return one of the latest requests at this port, by its id or that of its answer: also why tokens of
        its prompt were computed. No text."""
        found = next((row for row in await latest() if request_id in {row["request_id"], row["id"]}), None)
        if found is None:
            raise RequestError(f"no such request is among the last {RECENT_MAX}", status=404)
        return found

    app.add_api_route("/cluster/requests", requests)
    app.add_api_route("/cluster/requests/{request_id:path}", request)
