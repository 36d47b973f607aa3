"""Run a server: start the cluster and its HTTP and gRPC endpoint, and stop both."""

import asyncio
import faulthandler
import logging
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import uvloop
from rich.console import Console

from tidemill.cluster.edge.chat.templates import Template
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_template, load_tokenizer
from tidemill.cluster.edge.cluster_service import ClusterService
from tidemill.cluster.edge.http.same_origin import open_line
from tidemill.cluster.edge.requests.api_keys import KeysWatch
from tidemill.cluster.edge.requests.context import (
    EdgeContext,
    Sources,
    StopReason,
    open_context,
    with_database,
)
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.service import ReportingEdge, ServedModel
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.observability.logs import LINES_KEPT, keeping
from tidemill.cluster.observability.spans import tracing
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, Sockets, listening, with_router_ports
from tidemill.cluster.processes.endpoint.run_endpoint import (
    Run,
    Work,
    prepare_process,
    run_endpoint,
    run_serving,
    stop_signals,
    url_of,
)
from tidemill.cluster.processes.frontends import Frontends, edge_arguments
from tidemill.cluster.processes.launch import Cluster, RayEnded, start_cluster
from tidemill.cluster.processes.mooncake_service import planned_store
from tidemill.cluster.processes.publisher import CataloguePublisher, PublishedFleet
from tidemill.cluster.processes.store_plan import check_shared, other_tiers
from tidemill.cluster.processes.supervisor_client import beside
from tidemill.cluster.processes.support_info import support_parts
from tidemill.cluster.processes.system.children import STOP_SIGNALS
from tidemill.cluster.processes.system.private_folder import private_folder
from tidemill.cluster.quotas.rate_client import RouterRates
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.settings import ClusterSettings, FleetSettings, StoreProgram
from tidemill.kvstore.stores.open_store import open_store
from tidemill.workers.contract.engine import Check
from tidemill.workers.messages import WorkerGone

log = logging.getLogger(__name__)

RETRY_S = 0.2

STOP_S_MAX = 120.0
"""The time beside that of open answers that a server has to end: some calls of Ray may never return."""


def serve(
    endpoint: Endpoint, settings: ClusterSettings, sources: Sources, console: Console, work: Work
) -> None:
    """Start everything, serve until `work` returns or a signal comes, stop everything. Raises TidemillError
    when it cannot start; nothing is left running then."""
    if settings.detached_folder is None:
        _check(settings)  # report errors before anything is started
    templates = [load_template(fleet.model_folder, fleet.chat) for fleet in settings.fleets]
    prepare_process(endpoint)
    settings = with_router_ports(settings)
    with (
        listening(endpoint) as sockets,  # before the cluster starts, so that a port in use is reported early
        tracing(endpoint.telemetry, "frontend") as tracer,
    ):
        sources = replace(sources, tracer=tracer)
        tokenizers = beside(partial(_tokenizers, settings.fleets, templates))  # while Ray starts
        cluster = start_cluster(settings, console, partial(_check, settings), wait=tokenizers.result)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                server = _Server(endpoint, settings, cluster, sources, sockets)
                runner.run(server.run(tokenizers.result(), work))
        finally:
            for number in STOP_SIGNALS:  # a second one must not interrupt the stop
                signal.signal(number, signal.SIG_IGN)
            cluster.stop()


def _tokenizers(
    fleets: Sequence[FleetSettings], templates: Sequence[Template | None]
) -> list[FolderTokenizer]:
    pairs = zip(fleets, templates, strict=True)
    return [load_tokenizer(fleet.model_folder, fleet.chat, template) for fleet, template in pairs]


def _check(settings: ClusterSettings) -> None:
    """Raise what the workers would, before they are started."""
    for name, engine in {(worker.check, worker.engine) for worker in settings.workers}:
        check = cast("Check", resolve_name(name))  # imports torch, which takes a second
        check(engine, here=settings.ray_address is None)


@dataclass(frozen=True, slots=True)
class _Server:
    """The endpoint of a running cluster, in this process or in edge processes of its own."""

    endpoint: Endpoint
    settings: ClusterSettings
    cluster: Cluster
    sources: Sources
    sockets: Sockets

    async def run(self, tokenizers: Sequence[FolderTokenizer], work: Work) -> None:
        endpoint, fleets, writers = self.endpoint, self.settings.fleets, self.cluster.catalogue_writers()
        late_s = {fleet.names[0]: fleet.router.ttft_s_max for fleet in fleets}
        metrics = EdgeMetrics(self.sources.clock_s, late_s, endpoint.telemetry.metrics_alias)
        edge = ReportingEdge(self.sources.new_id(), metrics)
        services = [self._service(fleet, edge) for fleet in fleets]
        lines = deque[str](maxlen=LINES_KEPT)
        context = open_context(
            [ServedBackend(*backend) for backend in zip(services, tokenizers, strict=True)],
            self.sources,
            metrics=metrics,
            limits=endpoint.limits,
            keys=endpoint.security.keys,
            parts=support_parts(endpoint, self.settings, lines),
        )
        context = with_database(context, endpoint.database)
        context.keys.shared = rates = RouterRates(
            edge.id,
            lambda: [writer.address for writer in writers.values() if writer.address],
            fleets[0].router.tls,
        )
        published = [PublishedFleet(*pair) for pair in zip(fleets, services, strict=True)]
        keys_file = endpoint.security.keys_file
        others: list[Run] = [] if keys_file is None else [KeysWatch(context.keys, keys_file).run]
        others.append(CataloguePublisher(published, writers, context, endpoint.telemetry).run)
        if line := open_line(endpoint.host, context.keys):
            log.warning("%s", line)
        url = url_of(endpoint, self.sockets)
        stopping = partial(_end_in_time, context.shutdown_s_max)
        try:
            with keeping(lines), stop_signals(stopping) as stop:
                watch = _watch(self.cluster, context.stop_reason, stopping)
                if endpoint.frontends == 1:
                    runs = [*(service.run for service in services), *others]
                    await run_endpoint(endpoint, context, self.sockets, stop, runs, work(url), watch)
                    return
                frontends = await self._frontends(context)
                runs = [*(partial(_announced, frontends, service.run) for service in services), *others]
                announced = _announced(frontends, partial(work, url))
                await run_serving(frontends.run(), frontends.stop, stop, runs, announced, watch)
        finally:
            await rates.close()
            for service in services:
                await service.close()

    def _service(self, fleet: FleetSettings, edge: ReportingEdge) -> ClusterService:
        workers, router = self.cluster.workers(fleet), fleet.router
        lender = router.memory_router  # of another fleet, which assigns the budgets of this one
        model = ServedModel(
            names=fleet.names,
            folder=fleet.model_folder,
            max_model_len=min(worker.max_model_len for worker in workers),
            vocab_size=workers[0].vocab_size,
            eos_token_ids=workers[0].eos_token_ids,
            pooling=workers[0].pooling,
            created_s=int(self.sources.unix_time_s()),
            prefix_caching=fleet.prefix_caching,
            cold_start_s_max=fleet.cold_start_s_max,
        )
        return ClusterService(
            model,
            self.cluster.router(fleet, *router.names),
            WorkerClients(tls=router.tls),
            workers[0],
            edge=edge,
            memory=None if lender is None else self.cluster.router(fleet, lender),
            tracer=self.sources.tracer,
        )

    async def _frontends(self, context: EdgeContext) -> Frontends:
        """Return the edge processes of this server, which join through the first catalogue that answers."""
        writers = self.cluster.catalogue_writers()
        joins: list[str] = []
        while not joins:
            for name, writer in writers.items():
                try:
                    joins.append(await writer.connect())
                except (WorkerGone, OSError) as error:
                    log.info("%s: %s", name, error)
                    await asyncio.sleep(RETRY_S)
                finally:
                    await writer.close()
        port, tls = self.sockets.http.getsockname()[1], self.settings.fleets[0].router.tls
        arguments = edge_arguments(self.endpoint, port, joins, tls)
        detached = self.settings.detached_folder is not None
        return Frontends(self.endpoint, self.sockets, arguments, context.parts, detached=detached)


async def _announced(frontends: Frontends, run: Run) -> None:
    """Run what begins when all edge processes serve: also the reports to the supervisor, because the time
    without requests, after which a model loses its workers, begins with the first of them."""
    await frontends.ready()
    await run()


async def _watch(cluster: Cluster, stop_reason: StopReason, stopping: Callable[[], None]) -> None:
    """Wait for the end of the cluster's own Ray; raises RayEnded then, which open answers report."""
    try:
        await cluster.run()
    except RayEnded as error:
        log.error("%s", error)  # noqa: TRY400 - expected
        stop_reason.text = str(error)
        stopping()
        raise


def _end_in_time(answers_s_max: Callable[[], float]) -> None:
    """Kill this process if it still runs in `answers_s_max()` and STOP_S_MAX, and print where its threads
    are."""
    faulthandler.dump_traceback_later(answers_s_max() + STOP_S_MAX, exit=True)


@contextmanager
def shared_store(
    url: str | None, folders: tuple[Path, ...], root: Path | None
) -> Generator[tuple[str, tuple[StoreProgram, ...]]]:
    """Yield the URL of a store that several processes can share, and the programs to run for it. It is the
    store of `url`, checked, or a temporary folder without `url`. The folder is made in the first of `folders`
    that exists. A detached server is in the folder `root`."""
    if url is None:
        base = next((folder for folder in folders if folder.is_dir()), None)
        parent = Path(tempfile.gettempdir()) if base is None else base
        with private_folder("tidemill-store-", parent) as folder:
            yield f"file://{folder}", ()
        return
    check_shared(url)
    if files := other_tiers(url):
        asyncio.run(open_store(files).close())
    # Mooncake's client would replace the signal handlers of this process, so it is not opened here.
    yield planned_store(url, root)
