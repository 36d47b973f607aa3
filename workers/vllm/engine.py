"""The engine of a worker, by a vLLM server: streams, load, announcements, and whether it still works."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import restorable_end
from tidemill.kvstore.periodic import FAILED_ROUNDS, every
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    NO_MEMORY,
    Announcement,
    Delta,
    EngineInfo,
    HandedOver,
    Produced,
    Provenance,
    Request,
    RequestError,
    Times,
    WorkerGone,
    WorkerLoad,
    features_of,
)
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.vllm.client import VllmClient
from tidemill.workers.vllm.generate import body_of, delta_of, priority_of, prompt_body_of
from tidemill.workers.vllm.metrics import Metrics
from tidemill.workers.vllm.prefixes import Prefixes
from tidemill.workers.vllm.server_process import EngineEnded
from tidemill.workers.vllm.step_times import StepTimes

if TYPE_CHECKING:  # needs the extra `events`
    from tidemill.workers.vllm.events import Subscription

PUMP_S = 0.25
"""The period in which events are taken; a request and a report take them, too."""

LOOK_S = 2.0
"""The period in which the server's metrics are read, which costs it some milliseconds."""

PULL_LOOK_S = 0.05

PULLED_S_MAX = 10.0
"""The longest time that a server without requests goes on for others to pull its blocks."""

QUIET_S_MAX = 10.0
"""The time without an answer to these calls after which the worker reports no progress, so that its streams
go on elsewhere."""

SILENT_S_MAX = 30.0
SILENT_LOOKS = 3
"""The time without an answer and the number of looks in a row without one after which the server is given up.
On a machine that stands still for a minute one look fails."""


@dataclass(slots=True, eq=False)
class _Call:
    request: Request
    produces: bool  # only the prompt is computed here
    reused_tokens: int
    began_s: float
    hand_over: Callable[[], None]
    streams: bool = False  # its first token is drawn
    paused: bool = False  # its reader does not read, and vLLM may have ended it

    @property
    def missing_tokens(self) -> int:
        return len(self.request.tokens) - self.reused_tokens

    @property
    def queued_tokens(self) -> int:
        return 0 if self.streams or self.request.handoff else self.missing_tokens


class VllmEngine:
    def __init__(
        self,
        client: VllmClient,
        info: EngineInfo,
        first: Metrics,
        prefixes: Prefixes,
        events: "Subscription | None",
        *,
        prioritizes: bool,
        wedged_s_max: float,
    ) -> None:
        """`first` are the metrics at the start. Without `events` nothing is announced. A server that answers
        and makes no step in `wedged_s_max`, while it has requests, is given up."""
        self.progress = 0
        self._client = client
        self._info = info
        self._metrics = first
        self._prefixes = prefixes
        self._events = events
        self._prioritizes = prioritizes
        self._wedged_s_max = wedged_s_max
        self._produces = self._generates = True
        self._calls: set[_Call] = set()
        self._computing: set[bytes] = set()  # the keys of the pages of calls
        self._looked_s = self._stepped_s = 0.0
        self._silent_looks = 0
        self._step_times = StepTimes()
        self._dead = asyncio.Event()

    async def run(self) -> None:
        """Take events, read metrics, and raise EngineEnded when the server answers nothing, steps no more, or
        reports its own end to a request."""
        self._looked_s = self._stepped_s = _now_s()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(every(PUMP_S, self._pump, "KV events of vLLM"))
                tasks.create_task(every(LOOK_S, self._look, "metrics of vLLM", fatal=(EngineEnded,)))
                await self._dead.wait()
                raise EngineEnded(f"the engine of vLLM at {self._client.url} has ended: see its lines above")
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections to the server, which ends its requests of this worker."""
        await self._client.close()
        if self._events is not None:
            self._events.close()

    async def produce(
        self,
        request: Request,
        notify: Notify | None = None,  # noqa: ARG002 - it runs nothing alone
    ) -> Produced:
        """Compute the prompt. vLLM keeps it until a decode worker has pulled it, or its lease ends."""
        async with self._running(request, produces=True) as call:
            handoff = await self._client.prefill(prompt_body_of(request, self._priority(call)))
            self._step_times.token(call, _now_s())
            depth = restorable_end(len(request.tokens), self._info.page_tokens)
            return Produced(depth=depth, provenance=_provenance(call), handoff=handoff)

    async def prefetch(self, request: Request) -> Produced:  # noqa: ARG002
        raise HandedOver("vLLM fetches no pages")

    async def stream(
        self,
        request: Request,
        emit: Emit[Delta],
        notify: Notify | None = None,  # noqa: ARG002 - it runs nothing alone
    ) -> None:
        async with (
            self._running(request, produces=False) as call,
            aclosing(self._client.generate(body_of(request, self._priority(call)))) as frames,
        ):
            async for frame in frames:
                delta = delta_of(frame, request.sampling.logprobs)
                if delta is None:
                    continue
                self._stepped_s = _now_s()
                if delta.tokens:
                    self._step_times.token(call, self._stepped_s, len(delta.tokens))
                if not call.streams:
                    if request.handoff:  # it has waited for its pages
                        self._step_times.begin(call, 0, self._stepped_s)
                    call.streams = True
                    delta = msgspec.structs.replace(delta, provenance=_provenance(call))
                if (pause := emit(delta)) is not None:
                    self._step_times.end(call)
                    call.paused = True
                    await pause()
                    call.paused = False

    @asynccontextmanager
    async def _running(self, request: Request, *, produces: bool) -> AsyncGenerator[_Call]:
        """Let the block run the request, until it is handed over."""
        if not (self._produces if produces else self._generates):
            raise HandedOver("the worker takes no more requests")
        self._check(request)
        try:
            async with asyncio.timeout(None) as until:
                with self._call(request, produces, lambda: until.reschedule(0.0)) as call:
                    yield call
        except TimeoutError:
            raise HandedOver("the worker hands its requests over") from None
        except WorkerGone:
            if await self._client.is_dead():
                self._dead.set()
            raise

    def _priority(self, call: _Call) -> int:
        return priority_of(call.request, call.began_s) if self._prioritizes else 0

    def _check(self, request: Request) -> None:
        """Raise RequestError for what would end the server, or what it cannot do."""
        if refused := features_of(request) & {*self._info.refuses}:
            raise RequestError(f"the engine of this model has no {' and '.join(sorted(refused))}")
        if max(request.tokens) >= self._info.vocab_size:
            raise RequestError(f"token ids are below {self._info.vocab_size}")

    @contextmanager
    def _call(self, request: Request, produces: bool, hand_over: Callable[[], None]) -> Generator[_Call]:  # noqa: FBT001
        self._take_events()
        end = restorable_end(len(request.tokens), self._info.page_tokens)
        pages = page_keys(self._prefixes.root(request.salt), request.tokens[:end], self._info.page_tokens)
        keys = [key[:ANNOUNCED_KEY_BYTES] for key in pages]
        call = _Call(request, produces, self._reused_tokens(keys), _now_s(), hand_over)
        computing = {*keys} - self._computing
        if not self._calls:
            self._stepped_s = call.began_s
        self._calls.add(call)
        self._computing |= computing
        if not request.handoff:
            self._step_times.begin(call, call.missing_tokens, call.began_s)
        try:
            yield call
        finally:
            self._calls.discard(call)
            self._computing -= computing
            self._step_times.end(call)

    def _reused_tokens(self, keys: Sequence[bytes]) -> int:
        """Return how many tokens of a prompt vLLM need not compute: those that can be restored, and without
        states those that it computes for other calls."""
        restorable = self._prefixes.restorable(keys)
        if self._info.state_bytes:
            return restorable
        shared = sum(1 for _ in takewhile(lambda key: key in self._computing, keys))
        return max(restorable, shared * self._info.page_tokens)

    def release(self, tenant: str, name: str) -> None:
        """Do nothing: no prefix is retained."""

    def restrict(self, *, produces: bool, generates: bool) -> None:
        """Hand over what another worker can continue; the rest runs to its end here."""
        self._produces, self._generates = produces, generates
        for call in tuple(self._calls):
            stays = call.streams and features_of(call.request) & {*self._info.inexact_with}
            if not (stays or (produces if call.produces else generates)):
                call.hand_over()

    def take_announcement(self, *, full: bool) -> Announcement:
        self._take_events()
        return self._prefixes.take(full=full)

    def load(self) -> WorkerLoad:
        metrics, calls = self._metrics, self._calls
        queued = sum(call.queued_tokens for call in calls)
        speed = self._step_times.speed
        streams = sum(call.streams for call in calls)
        budget = self._info.memory_bytes
        live = int(budget * min(1.0, metrics.usage))
        cached = max(0, min(budget, len(self._prefixes) * self._info.page_bytes) - live)
        memory = {"pages_live": live, "pages_cached": cached, "empty": budget - live - cached}
        return WorkerLoad(
            queued_tokens=queued,
            queued_s=speed.prefill_s(0, queued, self._info.step_tokens_max),
            running_rows=max(len(calls), int(metrics.running)),
            waiting_rows=int(metrics.values.get("num_requests_waiting", 0.0)),
            streams=streams,
            memory=NO_MEMORY | memory,
            budget_bytes=budget,
            speed=replace(speed, fetch_bytes_per_s=metrics.fetch_bytes_per_s),
            counters={**metrics.counters(), "failed_rounds": FAILED_ROUNDS.total()},
        )

    def resize(self, budget_bytes: int) -> None:
        """The memory of vLLM is fixed at its start."""

    async def drain_publications(self) -> None:
        """Wait until other servers have pulled the blocks that are kept for them."""
        with suppress(TimeoutError, WorkerGone):
            async with asyncio.timeout(PULLED_S_MAX):
                keeps = "prefill" in self._info.roles
                while keeps and (await self._client.metrics()).usage:  # noqa: ASYNC110 - nothing signals it
                    await asyncio.sleep(PULL_LOOK_S)

    async def _pump(self) -> None:
        self._take_events()
        if _now_s() - self._looked_s < QUIET_S_MAX:
            self.progress += 1

    def _take_events(self) -> None:
        if self._events is not None:
            self._events.pump(self._prefixes)

    async def _look(self) -> None:
        now_s = _now_s()
        try:
            metrics = await self._client.metrics()
        except WorkerGone as error:
            self._silent_looks += 1
            if self._silent_looks >= SILENT_LOOKS and _now_s() - self._looked_s > SILENT_S_MAX:
                raise EngineEnded(str(error)) from error
            return
        self._silent_looks = 0
        self._looked_s = _now_s()
        if not self._is_busy() or metrics.steps != self._metrics.steps:
            self._stepped_s = max(self._stepped_s, now_s)
        self._metrics = metrics
        if now_s - self._stepped_s > self._wedged_s_max:
            raise EngineEnded(
                f"vLLM at {self._client.url} answers, and has made no step for its requests in"
                f" {self._wedged_s_max:g} s"
            )

    def _is_busy(self) -> bool:
        """Return whether the server has requests that it steps for."""
        return any(not call.paused for call in self._calls)


def _provenance(call: _Call) -> Provenance:
    """Return the source of the prompt's tokens, by the events and the calls before this one. What a pull that
    fails makes vLLM compute counts as fetched."""
    seconds = _now_s() - call.began_s
    if call.request.handoff:
        return Provenance(
            reused_tokens=call.reused_tokens,
            fetched_tokens=call.missing_tokens,
            times=Times(fetched_s=seconds),
        )
    return Provenance(
        reused_tokens=call.reused_tokens,
        computed_tokens=call.missing_tokens,
        times=Times(computed_s=seconds),
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
