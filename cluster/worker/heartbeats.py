"""Report to each router, while the engine makes progress."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import Malformed, decode, encode_heartbeat
from tidemill.cluster.rpc.router_failover import FindRouter
from tidemill.cluster.worker.assignment import Assignment
from tidemill.kvstore.periodic import every
from tidemill.workers.contract.engine import AnnouncingEngine, ReportingEngine
from tidemill.workers.messages import Ack, Announcement, Heartbeat, WorkerGone, WorkerLoad

if TYPE_CHECKING:  # generic only in the type stubs
    ReportMethod = grpc.aio.StreamStreamMultiCallable[bytes, bytes]

LOOK_S = 0.25
"""The interval at which a worker checks whether there are changes to report."""

BEAT_S_MAX = 0.9
"""The interval of heartbeats without changes. With the time of a check it is about a second."""

RECONNECT_S = 0.1

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unsent:
    added: set[bytes] = field(default_factory=set[bytes])
    removed: set[bytes] = field(default_factory=set[bytes])


class UnsentAnnouncements:
    """The changes that each router has not received yet. The engine itself announces each change once."""

    def __init__(self, engine: AnnouncingEngine) -> None:
        self._engine = engine
        self._unsent: dict[object, _Unsent] = {}

    def take(self, router: object, *, full: bool) -> Announcement:
        """Return the changes that this router has not received. Its first call must be a full one."""
        latest = self._engine.take_announcement(full=False)
        for unsent in self._unsent.values():
            unsent.added = (unsent.added - {*latest.removed}) | {*latest.added}
            unsent.removed = (unsent.removed - {*latest.added}) | {*latest.removed}
        changes = None if full else self._unsent[router]
        self._unsent[router] = _Unsent()
        if changes is None:
            return self._engine.take_announcement(full=True)
        return Announcement(added=tuple(changes.added), removed=tuple(changes.removed))

    def forget(self, router: object) -> None:
        self._unsent.pop(router, None)


class Heartbeats:
    """The heartbeats to one router. Of several routers, `follow` selects the one whose orders count. Without
    `unsent` it is the router of another fleet, which only sets the budget of this worker."""

    def __init__(
        self,
        engine: ReportingEngine,
        duties: Assignment,
        find_router: FindRouter,
        unsent: UnsentAnnouncements | None,
        tls: MutualTls | None = None,
        revoke: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        """`revoke` gets the serials of certificates that the router has revoked."""
        self._engine = engine
        self._duties = duties
        self._find_router = find_router
        self._unsent = unsent
        self._tls = tls
        self._revoke = revoke
        self._on_answer: Callable[[], None] | None = None
        self._takes_budgets = unsent is None
        self._sequence = 0
        self._asked_bytes: int | None = None  # of the engine, by the last ack with a budget

    def follow(self, on_answer: Callable[[], None], *, budgets: bool = True) -> None:
        """Follow the router's orders; with `budgets` also those about memory. `on_answer` is called at every
        acknowledged heartbeat: from the first on, the router knows the worker."""
        self._on_answer = on_answer
        self._takes_budgets = budgets

    async def run(self) -> None:
        """Report until cancelled, to the current router; a new connection starts with a full announcement."""
        await every(RECONNECT_S, self._connect, "heartbeats")

    async def _connect(self) -> None:
        """Report over one connection, until it ends."""
        try:
            async with open_channel(await self._find_router(), self._tls) as channel:
                await self._report(channel)
        except (
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
            WorkerGone,
            Malformed,
            OSError,
        ) as error:
            log.info("the router did not acknowledge a heartbeat: %s", error)
        finally:
            if self._unsent is not None:
                self._unsent.forget(self)

    async def _report(self, channel: grpc.aio.Channel) -> None:
        name = "Report" if self._unsent is not None else "Memory"
        method: ReportMethod = channel.stream_stream(f"/tidemill.Router/{name}")
        now_s = asyncio.get_running_loop().time
        stream = method()
        full = True
        progress = -1
        sent: WorkerLoad | None = None
        sent_duties = (self._duties.info.role, self._duties.draining)
        sent_at_s = 0.0
        while True:
            load = self._engine.load()
            duties = (self._duties.info.role, self._duties.draining)
            new = sent is None or full or replace(load, counters=sent.counters) != sent
            new |= duties != sent_duties
            if self._engine.progress != progress and (new or now_s() - sent_at_s >= BEAT_S_MAX):
                progress, sent, sent_duties, sent_at_s = self._engine.progress, load, duties, now_s()
                await stream.write(encode_heartbeat(self._beat(load, full=full)))
                answer = await stream.read()
                if not isinstance(answer, bytes):  # the end of the stream
                    return
                ack = decode(Ack, answer)
                full = ack.want_full
                if ack.revoked and self._revoke is not None:
                    self._revoke(ack.revoked)
                if self._takes_budgets:
                    self._take_budget(ack.budget_bytes, load)
                if self._on_answer is not None:
                    self._duties.apply(ack)
                    self._on_answer()
            await asyncio.sleep(LOOK_S)

    def _take_budget(self, budget_bytes: int | None, reported: WorkerLoad) -> None:
        """Apply a budget. The latest one counts, also when it revokes one that the engine has not applied
        yet."""
        if budget_bytes is None or budget_bytes == (self._asked_bytes or reported.budget_bytes):
            return
        self._asked_bytes = budget_bytes
        self._engine.resize(budget_bytes)

    def _beat(self, load: WorkerLoad, *, full: bool) -> Heartbeat:
        self._sequence += 1
        announcement = Announcement() if self._unsent is None else self._unsent.take(self, full=full)
        return Heartbeat(
            info=self._duties.info,
            sequence=self._sequence,
            load=load,
            announcement=announcement,
            draining=self._duties.draining,
        )
