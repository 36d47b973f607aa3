"""The process of `tidemill edge`: it learns a cluster from its routers and serves it, without Ray and torch.

It holds nothing that another edge needs. While no router answers it serves what it knows, and it
follows changes of models and keys.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, cast

import uvloop

from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.edge.cluster_service import ClusterService
from tidemill.cluster.edge.http.same_origin import open_line
from tidemill.cluster.edge.records.database import DatabaseSettings
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.context import EdgeContext, Sources, open_context, with_database
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.service import ReportingEdge, ServedModel
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.mutual_tls import MutualTls, refusal_of
from tidemill.cluster.observability.logs import LINES_KEPT, keeping, start_logs
from tidemill.cluster.observability.redact import without_secrets
from tidemill.cluster.observability.spans import tracing
from tidemill.cluster.processes.endpoint.edge_group import LinkedGroup
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, Sockets, inherited, listening
from tidemill.cluster.processes.endpoint.run_endpoint import (
    Work,
    prepare_process,
    run_endpoint,
    stop_signals,
    url_of,
)
from tidemill.cluster.quotas.rate_client import RouterRates
from tidemill.cluster.rpc.catalogue import Catalogue, CatalogueModel, Limit
from tidemill.cluster.rpc.catalogue_client import CatalogueReader, Expelled
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.files import read_regular
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import Unserved

if TYPE_CHECKING:
    from tidemill.cluster.processes.joining.credentials import Credentials  # cryptography

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 1 << 30
"""The size of a file that a model's tokenizer may have."""

RETRY_S = 0.2
REPORT_S = 10.0
"""The period of the lines about a cluster that cannot be joined yet."""


class JoinError(TidemillError):
    """The cluster refuses this edge, or its catalogue cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The addresses of routers, our certificate, and the folder in which tokenizers are kept. With
    `credentials` both come by a token."""

    routers: tuple[str, ...]
    tls: MutualTls | None
    cache_folder: Path
    credentials: "Credentials | None" = None


def run_edge(endpoint: Endpoint, join: Join, sources: Sources, work: Work) -> None:
    """Join a cluster and serve it until `work` returns or a signal comes. Raises TidemillError when it cannot
    start."""
    start_logs(endpoint.telemetry)
    prepare_process(endpoint)
    with listening(endpoint) as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(endpoint, join, sources, sockets, work))


def run_frontend(endpoint: Endpoint, join: Join, sources: Sources, numbers: str) -> None:
    """Be an edge process of a server, with inherited sockets, until that ends or a signal comes."""
    start_logs(endpoint.telemetry)
    prepare_process(endpoint)
    sockets, link = inherited(numbers)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(endpoint, join, sources, sockets, None, LinkedGroup(link)))


async def _run(
    endpoint: Endpoint,
    join: Join,
    sources: Sources,
    sockets: Sockets,
    work: Work | None,
    group: LinkedGroup | None = None,
) -> None:
    with stop_signals() as stop:
        stopping = asyncio.create_task(stop.wait())
        joining = asyncio.create_task(_enter(join))
        try:
            await asyncio.wait({stopping, joining}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                return
            join, reader, catalogue = joining.result()
        finally:
            joining.cancel()
            stopping.cancel()
        lines = deque[str](maxlen=LINES_KEPT)
        with tracing(catalogue.telemetry, "edge") as tracer, keeping(lines):
            sources = replace(sources, tracer=tracer)
            edge = _JoinedEdge(reader, join, sources, catalogue, lines, group, endpoint.database)
            try:
                await edge.apply(catalogue)
                if group is None and (line := open_line(endpoint.host, edge.context.keys)):
                    log.warning("%s", line)
                if group is not None:
                    working = group.run(edge.context, lines)
                else:
                    assert work is not None
                    working = work(url_of(endpoint, sockets))
                works = [working, edge.run()]
                if join.credentials is not None:
                    works.append(join.credentials.renew())
                await run_endpoint(endpoint, edge.context, sockets, stop, [], *works)
            finally:
                await edge.close()


async def _enter(join: Join) -> tuple[Join, CatalogueReader, Catalogue]:
    """Get a certificate if there is a token, and the first catalogue. Raises JoinRefused, and JoinError and
    Expelled when a router refuses our certificate."""
    if join.credentials is not None:
        await join.credentials.join()
        join = replace(join, tls=join.credentials.tls, routers=join.credentials.routers)
    reader = CatalogueReader(join.routers, join.tls)
    return join, reader, await _first(reader, join)


async def _first(reader: CatalogueReader, join: Join) -> Catalogue:
    """Return the first catalogue. Raises JoinError and Expelled when a router refuses our certificate."""
    now_s = asyncio.get_running_loop().time
    reported_s = -REPORT_S
    while True:
        address = reader.address
        try:
            catalogue = await reader.changed()
        except Unserved as error:
            if refusal := await asyncio.to_thread(refusal_of, address, join.tls):
                raise JoinError(f"the router {address} refuses this edge: {refusal}") from error
            if now_s() - reported_s >= REPORT_S:
                log.warning("waiting for the cluster: %s", error)
                reported_s = now_s()
            await asyncio.sleep(RETRY_S)
        else:
            assert catalogue is not None, "a first catalogue is a change"
            return catalogue


class _JoinedEdge:
    """The models of the cluster, as the last catalogue has them."""

    def __init__(
        self,
        reader: CatalogueReader,
        join: Join,
        sources: Sources,
        catalogue: Catalogue,
        lines: deque[str],
        group: LinkedGroup | None,
        database: DatabaseSettings | None,
    ) -> None:
        self._reader = reader
        self._join = join
        self._sources = sources
        self._edge = sources.new_id()
        self._served: dict[tuple[str, ...], _Served] = {}
        self._changed: list[_Served] = []  # models that have changed; their streams go on
        self._ttft_s_max: dict[str, float] = {}
        metrics = EdgeMetrics(sources.clock_s, self._ttft_s_max, catalogue.telemetry.metrics_alias)
        context = open_context(
            [],
            sources,
            metrics=metrics,
            limits=limits_of(catalogue.limits),
            keys=keys_of(catalogue),
            parts={"logs": lambda: {"edge": without_secrets("\n".join(list(lines)))}}
            if group is None
            else group.parts(),
            group=group,
        )
        self.context: EdgeContext = with_database(context, database)
        self._rates = RouterRates(self._edge, self._routers, join.tls)
        self.context.keys.shared = self._rates

    def _routers(self) -> list[str]:
        return [address for entry in self._served.values() for address in entry.model.routers]

    async def run(self) -> None:
        """Follow the catalogue until cancelled. What cannot be used is logged, and what was known stays.
        Raises Expelled."""
        await every(RETRY_S, self._follow, "catalogue", fatal=(Expelled,))

    async def _follow(self) -> None:
        try:
            catalogue = await self._reader.changed()
            if catalogue is not None:
                await self.apply(catalogue)
        except Expelled:
            raise
        except TidemillError as error:
            log.info("this edge serves what it knows: %s", error)

    async def apply(self, catalogue: Catalogue) -> None:
        """Serve this catalogue from now on. Models that are as before keep their connections. Raises
        TidemillError and changes nothing then, except the keys."""
        self.context.keys.replace(keys_of(catalogue))
        try:
            served = {model.names: await self._serve(model) for model in catalogue.models}
        except BaseException:
            self._reader.forget()
            raise
        for (name, *_), entry in served.items():
            self._ttft_s_max[name] = entry.model.ttft_s_max
            self.context.metrics.of_model(name)
            entry.service.resets = max(entry.service.resets, catalogue.resets.get(name, 0))
        self.context.models.replace(
            [ServedBackend(entry.service, entry.tokenizer) for entry in served.values()]
        )
        before, self._served = self._served, served
        for names, entry in before.items():
            if served.get(names) is not entry:
                entry.stop_watching()
                self._changed.append(entry)
        for entry in served.values():
            entry.watch = entry.watch or asyncio.create_task(entry.service.run())

    async def _serve(self, model: CatalogueModel) -> "_Served":
        """Return the model as it is served already, or with connections of its own if it has changed."""
        known = self._served.get(model.names)
        if known is not None and known.model == model:
            return known
        folder = await self._folder(model.files)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder, model.chat)
        tls = self._join.tls
        served = ServedModel(
            names=model.names,
            folder=folder,
            max_model_len=model.info.max_model_len,
            vocab_size=model.info.vocab_size,
            eos_token_ids=model.info.eos_token_ids,
            pooling=model.info.pooling,
            created_s=model.created_s,
            prefix_caching=model.prefix_caching,
            cold_start_s_max=model.cold_start_s_max,
        )
        memory = model.memory_router
        service = ClusterService(
            served,
            RouterClient(*map(always_at, model.routers), tls=tls),
            WorkerClients(tls=tls),
            model.info,
            edge=ReportingEdge(self._edge, self.context.metrics),
            memory=None if memory is None else RouterClient(always_at(memory), tls=tls),
            tracer=self._sources.tracer,
        )
        return _Served(model, service, tokenizer)

    async def _folder(self, files: Mapping[str, str]) -> Path:
        """Return a folder with these files, by their digests; those that are not there are fetched."""
        name = sha256("\n".join(f"{name} {digest}" for name, digest in sorted(files.items())).encode())
        folder = self._join.cache_folder / "tokenizers" / name.hexdigest()[:32]
        for file, digest in files.items():
            parts = PurePosixPath(file)
            if parts.is_absolute() or ".." in parts.parts:
                raise JoinError(f"the catalogue names a file {file!r}, which is not below a model's folder")
            path = folder / parts
            with suppress(OSError):
                if sha256(read_regular(path, FILE_BYTES_MAX)).hexdigest() == digest:
                    continue
            body = await self._reader.file(digest)
            try:
                await asyncio.to_thread(_write, path, body)
            except OSError as error:
                raise JoinError(f"{path} cannot be written ({error.strerror}): set XDG_CACHE_HOME") from error
        return folder

    async def close(self) -> None:
        for entry in (*self._served.values(), *self._changed):
            entry.stop_watching()
            await entry.service.close()
        await self._rates.close()
        await self._reader.close()


@dataclass(slots=True)
class _Served:
    """A model of the catalogue as this edge serves it."""

    model: CatalogueModel
    service: ClusterService
    tokenizer: FolderTokenizer
    watch: asyncio.Task[None] | None = None  # gives up lost workers

    def stop_watching(self) -> None:
        if self.watch is not None:
            self.watch.cancel()


def _write(path: Path, body: bytes) -> None:
    """Write a file whole or not at all, because other edges may read it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as written:
        written.write(body)
    Path(written.name).replace(path)


def limits_of(limits: Mapping[str, Limit]) -> EdgeLimits:
    """Return the limits of a catalogue, without those that this version does not know."""
    known = {field.name for field in fields(EdgeLimits)}
    return EdgeLimits(**cast("dict[str, Any]", {name: limits[name] for name in known & limits.keys()}))


def keys_of(catalogue: Catalogue) -> list[ApiKey]:
    return [ApiKey(**asdict(key)) for key in catalogue.keys]
