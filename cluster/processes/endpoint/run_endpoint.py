"""Run the HTTP and gRPC servers of an endpoint until a signal or an error ends them."""

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from tidemill.cluster.edge.grpc_api.server import PublicServer
from tidemill.cluster.edge.http.app import APIS, app_of
from tidemill.cluster.edge.http.connection import with_limits
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.security import tls_context
from tidemill.cluster.metrics.history import PERIOD_S
from tidemill.cluster.processes.endpoint.batch_lane import BatchLane
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, PortTaken, Sockets, raise_file_limit
from tidemill.cluster.processes.endpoint.handshakes import EdgeServer
from tidemill.cluster.processes.endpoint.history_recorder import record_period
from tidemill.cluster.processes.system.children import STOP_SIGNALS
from tidemill.cluster.settings import authority
from tidemill.kvstore.periodic import every
from tidemill.workers.malloc import return_freed_memory, share_arenas

log = logging.getLogger(__name__)

Work = Callable[[str], Coroutine[Any, Any, None]]
"""The coroutine to run while the server is up, given its URL."""

Run = Callable[[], Coroutine[Any, Any, None]]
"""Runs until it is cancelled."""

SWITCH_S = 0.001
"""The time after which a thread yields the interpreter: the event loop waits that long for it, several times
per token."""

CANCEL_S = 1.0
"""The time after which a task that has not ended is cancelled again: a library may have swallowed it."""

RETURN_S = 5.0
"""The period in which freed memory is returned to the system."""


def prepare_process(endpoint: Endpoint) -> None:
    """Let this process hold many connections, and few arenas of malloc. To be called before threads start."""
    raise_file_limit(endpoint.limits.connections_max)
    share_arenas()
    sys.setswitchinterval(SWITCH_S)


@contextmanager
def stop_signals(begun: Callable[[], None] = lambda: None) -> Generator[asyncio.Event]:
    """Yield an event that a signal sets; then `begun` is called. Later signals are ignored, because the
    process stops already."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def begin() -> None:
        if not stop.is_set():
            stop.set()
            begun()

    for number in handled:
        loop.add_signal_handler(number, begin)
    try:
        yield stop
    finally:
        for number in handled:  # the end of the loop would make the next signal kill this process
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def run_endpoint(
    endpoint: Endpoint,
    context: EdgeContext,
    sockets: Sockets,
    stop: asyncio.Event,
    runs: Sequence[Run],
    *works: Coroutine[Any, Any, None],
) -> None:
    """Serve and run `runs` until one of `works` is done or `stop` is set; then end all of them. Raises what
    `works` raise, and PortTaken for the gRPC port."""
    try:
        grpc_servers = await _start_grpc(endpoint, context, sockets.grpc)
    except BaseException:
        for work in works:
            work.close()
        raise
    server = _http_server(endpoint, context)

    def end() -> None:
        server.config.timeout_graceful_shutdown = math.ceil(context.shutdown_s_max())
        server.should_exit = True

    recording = partial(record_period, context)
    all_runs = [*runs, lambda: every(PERIOD_S, recording, "history"), return_memory]
    if context.records is not None:
        all_runs += [context.records.run, BatchLane(context, context.records, APIS).run]
    all_runs += [server.run for server in grpc_servers]
    await run_serving(server.serve(sockets=[sockets.http]), end, stop, all_runs, *works)


async def return_memory() -> None:
    """Return to the system what large bodies have taken."""
    await every(RETURN_S, partial(asyncio.to_thread, return_freed_memory), "freed memory")


async def run_serving(
    serve: Coroutine[Any, Any, None],
    end: Callable[[], None],
    stop: asyncio.Event,
    runs: Sequence[Run],
    *works: Coroutine[Any, Any, None],
) -> None:
    """Run `serve`, which returns some time after `end`, and `runs`, until it or one of `works` is done or
    `stop` is set; then end all of them. Raises what `serve` and `works` raise."""
    others = [asyncio.create_task(run()) for run in runs]
    for task in others:
        task.add_done_callback(_log_error)
    serving = asyncio.create_task(serve)
    working = [asyncio.create_task(work) for work in works]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, *working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        end()
        left = {*working, stopping, *others}
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_S)
        await asyncio.wait({serving})
    for task in (*working, serving):
        if not task.cancelled():
            task.result()


def url_of(endpoint: Endpoint, sockets: Sockets) -> str:
    return f"{endpoint.scheme}://{authority(endpoint.host, sockets.http.getsockname()[1])}"


def _http_server(endpoint: Endpoint, context: EdgeContext) -> EdgeServer:
    app = app_of(context)
    app.openapi()  # builds the schema now, later it would delay streams
    gc.freeze()  # so that collecting the objects of a large body does not visit all others
    config = uvicorn.Config(
        app,
        http=with_limits(context.limits),
        log_config=None,  # so that uvicorn uses our logging
        access_log=False,
        ws="none",
    )
    return EdgeServer(config, tls_context(endpoint.security.tls))


async def _start_grpc(
    endpoint: Endpoint, context: EdgeContext, listener: socket.socket | None
) -> list[PublicServer]:
    """Start the gRPC server, if there is a port for one. Raises PortTaken."""
    if endpoint.grpc_port is None:
        return []
    server = PublicServer(context, tls=endpoint.security.tls)
    try:
        address = await server.start(endpoint.host, endpoint.grpc_port, listener)
    except OSError as error:
        raise PortTaken(f"{error}: give another --grpc-port") from error
    log.info("gRPC on %s", address)
    return [server]


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s broke", task.get_coro(), exc_info=error)
