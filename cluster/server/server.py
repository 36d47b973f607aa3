"""Run a server: start the cluster and its HTTP and gRPC endpoint, and stop both."""

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import uvloop
from rich.console import Console

from tidemill.cluster.edge.chat.templates import check_chat
from tidemill.cluster.edge.chat.text import Tokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.edge.cluster_service import ClusterService
from tidemill.cluster.edge.grpc_api.server import PublicServer
from tidemill.cluster.edge.http.app import app_of
from tidemill.cluster.edge.http.connection import with_limits
from tidemill.cluster.edge.requests.api_keys import KeysWatch
from tidemill.cluster.edge.requests.context import EdgeContext, Sources, StopReason, open_context
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.requests.security import tls_context
from tidemill.cluster.edge.service import Scaling, ServedModel
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.observability.logs import LINES_KEPT, keeping
from tidemill.cluster.observability.spans import tracing
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.server.endpoint import Endpoint, PortTaken, listening, raise_file_limit
from tidemill.cluster.server.handshakes import EdgeServer
from tidemill.cluster.server.support_info import support_parts
from tidemill.cluster.settings import ClusterSettings, FleetSettings
from tidemill.cluster.supervisor.launch import STOP_SIGNALS, Cluster, RayEnded, start_cluster
from tidemill.cluster.supervisor.mooncake_service import running_store
from tidemill.cluster.supervisor.private_folder import private_folder
from tidemill.cluster.supervisor.store_plan import check_shared, other_tiers
from tidemill.kvstore.stores.open_store import open_store
from tidemill.workers.engine.build import check_settings
from tidemill.workers.malloc import share_arenas

log = logging.getLogger(__name__)

Work = Callable[[str], Coroutine[Any, Any, None]]
"""The coroutine to run while the server is up, given its URL."""


SWITCH_S = 0.001
"""The time after which a thread yields the interpreter: the event loop waits that long for it, several times
per token."""


class _Runs(Protocol):
    async def run(self) -> None:
        """Run until cancelled."""
        ...


def serve(
    endpoint: Endpoint, settings: ClusterSettings, sources: Sources, console: Console, work: Work
) -> None:
    """Start everything, serve until `work` returns or a signal comes, stop everything. Raises TidemillError
    when it cannot start; nothing is left running then."""
    for engine in {worker.engine for worker in settings.workers}:
        check_settings(engine, here=settings.ray_address is None)  # report errors before anything is started
    for fleet in settings.fleets:
        check_chat(fleet.chat)
    raise_file_limit(endpoint.limits.connections_max)
    share_arenas()
    with (
        listening(endpoint) as listener,  # before the cluster starts, so that a port in use is reported early
        ThreadPoolExecutor(1) as executor,
        tracing(endpoint.telemetry, "frontend") as tracer,
    ):
        sources = replace(sources, tracer=tracer)
        folders, chats = zip(*((fleet.model_folder, fleet.chat) for fleet in settings.fleets), strict=True)
        tokenizers = executor.map(load_tokenizer, folders, chats)  # takes as long as starting the cluster
        cluster = start_cluster(settings, console)
        try:
            sys.setswitchinterval(SWITCH_S)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(endpoint, settings, cluster, list(tokenizers), sources, listener, work))
        finally:
            for number in STOP_SIGNALS:  # a second one must not interrupt the stop
                signal.signal(number, signal.SIG_IGN)
            cluster.stop()


async def _serve(
    endpoint: Endpoint,
    settings: ClusterSettings,
    cluster: Cluster,
    tokenizers: Sequence[Tokenizer],
    sources: Sources,
    listener: socket.socket,
    work: Work,
) -> None:
    fleets = settings.fleets
    metrics = EdgeMetrics(
        sources.clock_s,
        {fleet.names[0]: fleet.router.ttft_s_max for fleet in fleets},
        endpoint.telemetry.metrics_alias,
    )
    routers = [cluster.router(fleet) for fleet in fleets]
    scalers = [cluster.scaling(fleet, partial(metrics.misses, fleet.names[0])) for fleet in fleets]
    services = [
        _service(cluster, fleet, router, scaler, sources)
        for fleet, router, scaler in zip(fleets, routers, scalers, strict=True)
    ]
    lines = deque[str](maxlen=LINES_KEPT)
    context = open_context(
        [ServedBackend(*backend) for backend in zip(services, tokenizers, strict=True)],
        sources,
        metrics=metrics,
        limits=endpoint.limits,
        keys=endpoint.security.keys,
        parts=support_parts(endpoint, settings, lines),
    )
    grpc_servers = await _start_grpc(endpoint, context)
    keys_file = endpoint.security.keys_file
    watches = [] if keys_file is None else [KeysWatch(context.keys, keys_file)]
    working = work(f"{endpoint.scheme}://{endpoint.host}:{listener.getsockname()[1]}")
    try:
        with keeping(lines):
            runs = [*services, *scalers, *grpc_servers, *watches]
            await _serve_until_stopped(
                _http_server(endpoint, context), listener, runs, working, _watch(cluster, context.stop_reason)
            )
    finally:
        for service in services:
            await service.close()


async def _watch(cluster: Cluster, stop_reason: StopReason) -> None:
    """Wait for the end of the cluster's own Ray; raises RayEnded then, which open answers report."""
    try:
        await cluster.run()
    except RayEnded as error:
        log.error("%s", error)  # noqa: TRY400 - expected
        stop_reason.text = str(error)
        raise


async def _serve_until_stopped(
    server: "_Server",
    listener: socket.socket,
    runs: Sequence[_Runs],
    *works: Coroutine[Any, Any, None],
) -> None:
    """Serve and run `runs` until one of `works` is done or a signal comes; then end all of them. Raises what
    `works` raise."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, stop.set)
    others = [asyncio.create_task(run.run()) for run in runs]
    for task in others:
        task.add_done_callback(_log_error)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    working = [asyncio.create_task(work) for work in works]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, *working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        for task in (*working, stopping, *others):
            task.cancel()
        await asyncio.wait({serving, *working, stopping, *others})
        for number in handled:  # the end of the loop would make the next signal kill this process
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    for task in working:
        if not task.cancelled():
            task.result()


def _http_server(endpoint: Endpoint, context: EdgeContext) -> "_Server":
    app = app_of(context)
    app.openapi()  # builds the schema now, later it would delay streams
    gc.freeze()  # so that collecting the objects of a large body does not visit all others
    config = uvicorn.Config(
        app,
        http=with_limits(context.limits),
        log_config=None,  # so that uvicorn uses our logging
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=math.ceil(context.limits.shutdown_s_max),
    )
    return _Server(config, tls_context(endpoint.security.tls))


def _service(
    cluster: Cluster, fleet: FleetSettings, router: RouterClient, scaler: Scaling, sources: Sources
) -> ClusterService:
    workers = cluster.workers(fleet)
    name, *aliases = fleet.names
    model = ServedModel(
        name=name,
        aliases=tuple(aliases),
        folder=fleet.model_folder,
        max_model_len=min(worker.max_model_len for worker in workers),
        vocab_size=workers[0].vocab_size,
        eos_token_ids=workers[0].eos_token_ids,
        created_s=int(sources.unix_time_s()),
    )
    return ClusterService(
        model,
        router,
        cluster.peers(fleet),
        scaler,
        workers[0],
        memory=cluster.memory(fleet),
        tracer=sources.tracer,
    )


async def _start_grpc(endpoint: Endpoint, context: EdgeContext) -> list[PublicServer]:
    """Start the gRPC server, if there is a port for one. Raises PortTaken."""
    if endpoint.grpc_port is None:
        return []
    server = PublicServer(context, tls=endpoint.security.tls)
    try:
        address = await server.start(endpoint.host, endpoint.grpc_port)
    except OSError as error:
        raise PortTaken(f"{error}: give another --grpc-port") from error
    log.info("gRPC on %s", address)
    return [server]


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s broke", task.get_coro(), exc_info=error)


class _Server(EdgeServer):
    """A server that leaves signals to us, because the cluster must be stopped as well."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextmanager
def shared_store(url: str | None, folders: tuple[Path, ...]) -> Generator[str]:
    """Yield the URL of a store that several processes can share. It is the store of `url`, checked and with
    its processes running, or a temporary folder without `url`. The folder is made in the first of `folders`
    that exists."""
    if url is None:
        base = next((folder for folder in folders if folder.is_dir()), None)
        parent = Path(tempfile.gettempdir()) if base is None else base
        with private_folder("tidemill-store-", parent) as folder:
            yield f"file://{folder}"
        return
    check_shared(url)
    if files := other_tiers(url):
        asyncio.run(open_store(files).close())
    # Mooncake's client would replace the signal handlers of this process, so it is not opened here.
    with running_store(url) as store_url:
        yield store_url
