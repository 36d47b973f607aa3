"""An edge process of a server with several: it answers for all of them, by asking their server."""

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tidemill.cluster.edge.requests.context import EdgeContext, Parts
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.metrics.edge_samples import EdgeSamples, samples_of
from tidemill.cluster.observability.redact import without_secrets
from tidemill.cluster.processes.endpoint.link import AnswerT, Functions, Link
from tidemill.workers.messages import Unserved

PARTS = ("config", "software", "nodes", "logs")
"""The parts of a support bundle, which the server collects."""

LOOK_S = 0.05
ENDING_S_MAX = 2.0
"""The time in which a killed server's process ends after its sockets."""


class LinkedGroup:
    """The edges of a server, from one of them; see EdgeGroup."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._server_pid = os.getppid()
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known = EdgeSamples()

    async def run(self, context: EdgeContext, lines: Iterable[str]) -> None:
        """Answer the server about this edge until the server ends. Open answers have any time then, if it was
        killed. `lines` are those of our log."""
        functions: Functions = {
            "samples": lambda _: samples_of(context.metrics),
            "rows": lambda _: context.recent.rows(),
            "open_answers": lambda _: context.open_answers.held,
            "lines": lambda _: without_secrets("\n".join(list(lines))),
        }
        self._loop = asyncio.get_running_loop()
        self._link = await Link.open(self._end, functions)
        ready = asyncio.create_task(self._link.call("ready", type(None)))
        await self._link.run()
        ready.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S_MAX):
                while os.getppid() == self._server_pid:  # noqa: ASYNC110 - the kernel sends no event
                    await asyncio.sleep(LOOK_S)
                context.stop_reason.is_patient = True

    async def samples(self) -> EdgeSamples:
        """Return the sums, the last known ones with no edge up while the server does not answer."""
        try:
            self._known = await self._ask("samples", EdgeSamples)
        except Unserved:
            self._known = replace(self._known, up=dict.fromkeys(self._known.up, False))
        return self._known

    async def rows(self) -> list[Json]:
        return await self._ask("rows", list[Json])

    async def open_answers(self) -> int:
        return await self._ask("open_answers", int)

    def parts(self) -> Parts:
        """Return the functions that fetch each part of a support bundle, for another thread."""
        return {name: partial(self._part, name) for name in PARTS}

    def _part(self, name: str) -> object:
        """Return a part. Raises Unserved."""
        if self._loop is None:
            raise Unserved("this edge starts")
        asking = self._ask("part", tuple[object, str], name)
        part, error = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        if error:
            raise Unserved(error)
        return part

    async def _ask(self, name: str, kind: type[AnswerT], argument: object = None) -> AnswerT:
        if self._link is None:
            raise Unserved("this edge starts")
        return await self._link.call(name, kind, argument)
