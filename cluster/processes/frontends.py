"""The edge processes of `tidemill serve --frontends N`, to which the server hands on connections in turn.

Each is a `tidemill edge` that gets connections over a Unix socket instead of a port, and has a link to
the server. The server starts one again when it ends, and adds up what they count. When the server
ends, for any reason, so do they: those of a killed detached server after their open answers, because
its workers go on.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import cast

from tidemill.cluster.edge.requests.context import Parts
from tidemill.cluster.edge.requests.recent_requests import RECENT_MAX
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.listener import FULL_PAUSE_S, accept_some
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_samples import EdgeSamples, added
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, Sockets
from tidemill.cluster.processes.endpoint.link import AnswerT, Functions, Link
from tidemill.cluster.processes.restart_backoff import Backoff
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.periodic import FAILED_ROUNDS, every
from tidemill.workers.messages import Unserved

log = logging.getLogger(__name__)

POLL_S = 1.0
"""The age of the counts that remain of an edge that is killed."""

STOP_MARGIN_S = 5.0
"""The time to end beside that for open answers."""

SCRAPE_S_MAX = 1.0
"""The time for an edge to answer a scrape. The edge that asks waits for less than 5 s."""

MISSES_MAX = 2
"""The polls without an answer, each for 5 s, after which an edge stands still and is replaced. One of them
may be due to a pause of this process."""

DIES_WITH_US = "tidemill.cluster.processes.system.die_with_parent"


class FrontendEnded(TidemillError):
    """An edge process has ended while the server started."""


@dataclass(eq=False, slots=True)
class _Edge:
    process: asyncio.subprocess.Process
    link: Link
    handed: list[socket.socket]  # our ends, one for each listener
    serves: bool = False  # it is ready, and has answered the last call
    has_served: bool = False
    misses: int = 0  # consecutive polls without an answer
    samples: EdgeSamples = field(default_factory=EdgeSamples)  # the last
    sampled_s: float = 0.0


class Frontends:
    def __init__(
        self, endpoint: Endpoint, sockets: Sockets, join: Sequence[str], parts: Parts, *, detached: bool
    ) -> None:
        """`join` are the arguments of `tidemill edge`. `parts` are those of a support bundle. The edges of a
        `detached` server complete their answers if it is killed."""
        self._endpoint = endpoint
        self._listeners = [listener for listener in sockets if listener is not None]
        self._turns = cycle(range(endpoint.frontends))
        self._join = join
        self._prefix = () if detached else ("-m", DIES_WITH_US, str(os.getpid()))
        self._parts = parts
        self._edges: dict[int, _Edge] = {}  # by index
        self._ready: set[int] = set()  # the indices of those that have served
        self._all_ready = asyncio.Event()
        self._ended = EdgeSamples()  # the sums of those that have ended
        self._stop = asyncio.Event()
        self._backoff = Backoff()

    async def ready(self) -> None:
        """Wait until every edge serves."""
        await self._all_ready.wait()

    def stop(self) -> None:
        """Let `run` end the edges and return."""
        self._stop.set()

    async def run(self) -> None:
        """Keep the edges running until `stop`. Raises FrontendEnded if one ends before it has ever served."""
        for listener in self._listeners:
            listener.setblocking(False)  # noqa: FBT003 - its only argument
        keeping = [
            asyncio.create_task(every(0, partial(self._keep, index), "edge", fatal=(FrontendEnded,)))
            for index in range(self._endpoint.frontends)
        ]
        others = [
            asyncio.create_task(every(POLL_S, self._poll, "edge processes")),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait({*keeping, *others}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for listener in self._listeners:
                asyncio.get_running_loop().remove_reader(listener)
            for task in (*keeping, *others):
                task.cancel()
            await asyncio.wait({*keeping, *others})
            await asyncio.gather(*(self._end(edge.process) for edge in self._edges.values()))

    async def _keep(self, index: int) -> None:
        """Run the edge of this index once. Raises FrontendEnded if it ends before it has ever served."""
        await asyncio.sleep(self._backoff.begin(str(index), asyncio.get_running_loop().time()))
        try:
            edge = self._edges[index] = await self._start(index)
        except OSError as error:
            if index in self._ready:
                raise
            raise FrontendEnded(f"edge process {index} cannot be started: {error}") from error
        await edge.link.run()
        status = await edge.process.wait()
        del self._edges[index]
        self._set_serves(edge, serves=False)
        for handed in edge.handed:
            handed.close()
        self._ended = added([self._ended, edge.samples.ended()])
        if index not in self._ready:
            raise FrontendEnded(
                f"edge process {index} ended with status {status} while it started: see its log"
            )
        log.warning("edge process %d has ended with status %d and is started again", index, status)

    def _hand_on(self, at: int) -> None:
        """Accept connections of the listener at this index, and hand each to the next edge that serves."""
        try:
            for accepted, _ in accept_some(self._listeners[at]):
                with accepted:
                    self._hand_to_next(at, accepted)
        except OSError:  # no descriptor or memory
            self._listen(after_s=FULL_PAUSE_S)

    def _hand_to_next(self, at: int, accepted: socket.socket) -> None:
        for _ in range(self._endpoint.frontends):
            edge = self._edges.get(next(self._turns))
            if edge is not None and edge.serves:
                with suppress(OSError):  # it has ended, or takes none
                    socket.send_fds(edge.handed[at], [b"."], [accepted.fileno()])
                    return

    def _set_serves(self, edge: _Edge, *, serves: bool) -> None:
        edge.serves = serves
        edge.has_served |= serves
        self._listen()

    def _listen(self, after_s: float = 0.0) -> None:
        """Accept connections while an edge serves; at other times they wait in the kernel."""
        loop = asyncio.get_running_loop()
        serves = any(edge.serves for edge in self._edges.values())
        for at, listener in enumerate(self._listeners):
            if serves and not after_s:
                loop.add_reader(listener, self._hand_on, at)
            else:
                loop.remove_reader(listener)
        if after_s:
            loop.call_later(after_s, self._listen)

    async def _start(self, index: int) -> _Edge:
        pairs = [socket.socketpair() for _ in (*self._listeners, "the link")]
        theirs = [end for _, end in pairs]
        http, link, *grpc = [end.fileno() for end in (theirs[0], theirs[-1], *theirs[1:-1])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._prefix, "-m", "tidemill", "edge", *self._join),
            *("--inherited", ",".join(map(str, (http, link, *grpc)))),
            pass_fds=(http, link, *grpc),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=os.setpgrp,  # Ctrl-C is for the server, which ends them; no session: see detached.py
        )
        for end in theirs:
            end.close()
        *handed, ours = (end for end, _ in pairs)
        for end in handed:
            end.setblocking(False)  # noqa: FBT003 - its only argument
        return _Edge(process, await Link.open(ours, self._functions(index)), handed)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._endpoint.limits.shutdown_s_max + STOP_MARGIN_S):
                    await process.wait()
                    return
            process.kill()
            await process.wait()

    async def _poll(self) -> None:
        """Keep the counts of each edge, for they remain when it is killed, and kill one that stands still."""
        await self._refresh()
        for index, edge in self._edges.items():
            edge.misses = edge.misses + 1 if edge.has_served and not edge.serves else 0
            if edge.misses == MISSES_MAX:
                log.warning("edge process %d does not answer and is killed", index)
                with suppress(ProcessLookupError):
                    edge.process.kill()

    async def _refresh(self) -> None:
        async def refresh(edge: _Edge) -> None:
            try:
                edge.samples = await edge.link.call("samples", EdgeSamples)
                edge.sampled_s = asyncio.get_running_loop().time()
            except Unserved:
                self._set_serves(edge, serves=False)
            else:
                self._set_serves(edge, serves=True)

        await asyncio.gather(*map(refresh, self._edges.values()))

    async def _ask_all(self, name: str, kind: type[AnswerT]) -> list[AnswerT]:
        """Return the answers of those edges that answer."""
        calls = (edge.link.call(name, kind) for edge in self._edges.values())
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in found if not isinstance(answer, BaseException)]

    def _functions(self, index: int) -> Functions:
        """Return what the edge of this index may ask."""

        def ready(_: object) -> None:
            self._set_serves(self._edges[index], serves=True)
            self._ready.add(index)
            if len(self._ready) == self._endpoint.frontends:
                self._all_ready.set()

        return {
            "ready": ready,
            "samples": lambda _: self.samples(),
            "rows": lambda _: self._rows(),
            "open_answers": lambda _: self._open_answers(),
            "part": self._part,
        }

    async def samples(self) -> EdgeSamples:
        """Return the sums of the metrics of all edges, also of those that have ended. One that does not
        answer soon is in them with its last answer."""
        began_s = asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(SCRAPE_S_MAX):
                await self._refresh()
        summed = added([_own_samples(), self._ended, *(edge.samples for edge in self._edges.values())])
        answered = {index for index, edge in self._edges.items() if edge.sampled_s >= began_s}
        return replace(
            summed, up={str(index): index in answered for index in range(self._endpoint.frontends)}
        )

    async def _rows(self) -> list[Json]:
        found = [row for rows in await self._ask_all("rows", list[Json]) for row in rows]
        return sorted(found, key=lambda row: cast("float", row["started_unix_s"]), reverse=True)[:RECENT_MAX]

    async def _open_answers(self) -> int:
        return sum(await self._ask_all("open_answers", int))

    async def _part(self, name: str) -> tuple[object, str]:
        """Return a part of a support bundle, and an error."""
        try:
            part = await asyncio.to_thread(self._parts[name])
        except TidemillError as error:
            return None, str(error)
        if name == "logs":
            lines = enumerate(await self._ask_all("lines", str))
            part = cast("dict[str, str]", part) | {f"edge-{index}": text for index, text in lines}
        return part, ""


def _own_samples() -> EdgeSamples:
    name = specs.FAILED_ROUNDS.full_name
    counts = FAILED_ROUNDS.items()
    return EdgeSamples({name: [(f"{name}_total", (("task", task),), float(count)) for task, count in counts]})


def edge_arguments(endpoint: Endpoint, port: int, routers: Sequence[str], tls: MutualTls | None) -> list[str]:
    """Return the arguments of `tidemill edge` for an edge of this endpoint, which listens on `port`."""
    security, telemetry = endpoint.security.tls, endpoint.telemetry
    options: dict[str, object] = {
        "join": ",".join(routers),
        "host": endpoint.host,
        "port": port,
        "grpc-port": endpoint.grpc_port,
        "ssl-certfile": security and security.certificate,
        "ssl-keyfile": security and security.key,
        "ssl-ca-certs": security and security.client_ca,
        "cluster-ssl-certfile": tls and tls.certificate,
        "cluster-ssl-keyfile": tls and tls.key,
        "cluster-ssl-ca-certs": tls and tls.ca,
        "database-ttl": endpoint.database and endpoint.database.ttl_s,  # its URL is in the environment
        "log-level": telemetry.log_level,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--log-json"] if telemetry.log_json else given
