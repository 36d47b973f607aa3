"""One server: the cluster behind it and the HTTP endpoint before it, both started and both stopped."""

import asyncio
import logging
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from rich.console import Console

from tidemill.cluster.frontend import ClusterService
from tidemill.cluster.http.app import Sources, build_app
from tidemill.cluster.http.metrics import Metrics
from tidemill.cluster.launch import Cluster, start_cluster
from tidemill.cluster.scaler import Scaler
from tidemill.cluster.service import ServedModel
from tidemill.cluster.settings import ClusterSettings
from tidemill.cluster.store_plan import other_tiers
from tidemill.cluster.store_service import running_store
from tidemill.kvstore.errors import StoreError, TidemillError
from tidemill.kvstore.open_store import open_store
from tidemill.workers.api.text import Tokenizer
from tidemill.workers.api.tokenizer import load_tokenizer
from tidemill.workers.build import check_settings

log = logging.getLogger(__name__)

DRAIN_S_MAX = 5
"""Open streams may go on for this long after the server was told to stop."""


class PortTaken(TidemillError):
    """The endpoint cannot listen where it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the server listens, and what it calls its model."""

    host: str
    port: int
    model_name: str
    model_folder: Path


Work = Callable[[str], Awaitable[None]]
"""What to do with a server that is up, given its URL."""


def serve(
    endpoint: Endpoint, settings: ClusterSettings, sources: Sources, console: Console, work: Work
) -> None:
    """Start everything, run `work` beside the ready server until it returns or a signal comes, stop
    everything.

    Raises TidemillError when it cannot start; nothing is left running then.
    """
    for engine in {worker.engine for worker in settings.workers}:
        check_settings(engine)  # what is wrong there is said before anything is started
    with _listening(endpoint) as listener, ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(load_tokenizer, endpoint.model_folder)  # takes as long as the cluster
        cluster = start_cluster(settings, console)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(endpoint, settings, cluster, tokenizer.result(), sources, listener, work))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not leave half of it behind
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            cluster.stop()


async def _serve(
    endpoint: Endpoint,
    settings: ClusterSettings,
    cluster: Cluster,
    tokenizer: Tokenizer,
    sources: Sources,
    listener: socket.socket,
    work: Work,
) -> None:
    info = cluster.workers[0]
    model = ServedModel(
        name=endpoint.model_name,
        folder=endpoint.model_folder,
        max_model_len=min(worker.max_model_len for worker in cluster.workers),
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        created_s=int(sources.unix_time_s()),
    )
    service = ClusterService(model, cluster.router(), cluster.peers(), info)
    metrics = Metrics(sources.clock_s, settings.router.ttft_s_max)
    config = uvicorn.Config(
        build_app(service, tokenizer, sources, metrics=metrics),
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=DRAIN_S_MAX,
    )
    server = _Server(config)
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
    beside = [asyncio.create_task(service.run())]
    if settings.bounds:
        scaler = Scaler(
            cluster,
            service,
            settings.workers,
            settings.bounds,
            lambda: metrics.misses,
            settings.hysteresis,
        )
        beside.append(asyncio.create_task(scaler.run()))
    for task in beside:
        task.add_done_callback(_ended)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    working = asyncio.ensure_future(work(f"http://{endpoint.host}:{listener.getsockname()[1]}"))
    stopping = asyncio.create_task(told_to_stop.wait())
    try:
        await asyncio.wait({serving, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        working.cancel()
        stopping.cancel()
        for task in beside:
            task.cancel()
        await asyncio.wait({serving, working, stopping, *beside})
        await service.close()
    if not working.cancelled():
        working.result()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s broke", task.get_coro(), exc_info=error)


class _Server(uvicorn.Server):
    """Leaves the signals to us: the cluster behind it must be stopped as well."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextmanager
def _listening(endpoint: Endpoint) -> Generator[socket.socket]:
    """The endpoint's socket, taken first: a port that is in use is a mistake to tell before the cluster
    starts."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((endpoint.host, endpoint.port))
        except (OSError, OverflowError) as error:
            raise PortTaken(
                f"cannot listen on {endpoint.host}:{endpoint.port} ({error}): "
                "give another --host or --port, 0 takes a free one"
            ) from error
        listener.listen(2048)
        yield listener


@contextmanager
def shared_store(url: str | None, folders: tuple[Path, ...]) -> Generator[str]:
    """The URL of a store that several processes can share: that which `url` names, checked and with all that
    it needs running, or a folder of our own for this run."""
    if url is None:
        base = next((folder for folder in folders if folder.is_dir()), None)
        with tempfile.TemporaryDirectory(prefix="tidemill-store-", dir=base) as folder:
            yield f"file://{folder}"
        return
    if all(tier.startswith("memory") for tier in url.split(",")):
        raise StoreError("store memory: is inside one process: give workers a folder, file:///path?size=8GiB")
    if files := other_tiers(url):
        asyncio.run(open_store(files).close())
    with running_store(url) as shared:  # Mooncake's client is not for this process: it takes the signals
        yield shared
