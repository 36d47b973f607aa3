"""Publish the catalogue of a cluster to all its routers, so that edges can join it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256

from tidemill.cluster.edge.chat.templates import template_of
from tidemill.cluster.edge.chat.tokenizer_files import tokenizer_files
from tidemill.cluster.edge.cluster_service import ClusterService
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.rpc.catalogue import Catalogue, CatalogueKey, CatalogueModel
from tidemill.cluster.rpc.catalogue_client import CatalogueWriter
from tidemill.cluster.rpc.codec import encode
from tidemill.cluster.settings import ChatSettings, FleetSettings
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import Unserved, WorkerGone

log = logging.getLogger(__name__)

PUBLISH_S = 1.0
"""The time after which a changed key, or a router that has restarted, gets the catalogue."""


class PublishedFleet:
    """The parts of a catalogue that stay the same for one fleet, and its tokenizer files."""

    def __init__(self, fleet: FleetSettings, service: ClusterService) -> None:
        """Read the files. Raises OSError."""
        found = {name: path.read_bytes() for name, path in tokenizer_files(fleet.model_folder).items()}
        names = {name: sha256(body).hexdigest() for name, body in found.items()}
        self.files = {names[name]: body for name, body in found.items()}
        self.service = service
        self.router = fleet.router
        template = fleet.chat.template
        chat: ChatSettings = replace(fleet.chat, template=template and template_of(template))
        self._model = CatalogueModel(
            names=fleet.names,
            info=replace(service.info, max_model_len=service.model.max_model_len),
            created_s=service.model.created_s,
            routers=(),
            files=names,
            chat=chat,
            ttft_s_max=fleet.router.ttft_s_max,
            prefix_caching=fleet.prefix_caching,
            cold_start_s_max=fleet.cold_start_s_max,
        )

    def model(self, addresses: Mapping[str, str]) -> CatalogueModel:
        """Return the entry of the catalogue; `addresses` are those of known routers, by name."""
        known = tuple(addresses[name] for name in self.router.names if addresses.get(name))
        memory = addresses.get(self.router.memory_router or "")
        return replace(self._model, routers=known, memory_router=memory)


class CataloguePublisher:
    """Sends the catalogue to every router, again and again."""

    def __init__(
        self,
        fleets: list[PublishedFleet],
        writers: Mapping[str, CatalogueWriter],
        context: EdgeContext,
        telemetry: Telemetry,
    ) -> None:
        """`writers` are by name of the router."""
        self._fleets = fleets
        self._writers = writers
        self._context = context
        self._telemetry = telemetry
        self._files = {digest: body for fleet in fleets for digest, body in fleet.files.items()}
        self._away: set[str] = set()

    def catalogue(self) -> Catalogue:
        addresses = {name: writer.address for name, writer in self._writers.items()}
        return Catalogue(
            models=tuple(fleet.model(addresses) for fleet in self._fleets),
            keys=tuple(CatalogueKey(**key.model_dump()) for key in self._context.keys.known),
            limits=asdict(self._context.limits),
            telemetry=self._telemetry,
            resets={fleet.service.model.name: fleet.service.resets for fleet in self._fleets},
        )

    async def run(self) -> None:
        connecting = (self._try(name, writer.connect) for name, writer in self._writers.items())
        await asyncio.gather(*connecting, return_exceptions=True)
        try:
            await every(PUBLISH_S, self._publish, "catalogue")
        finally:
            for writer in self._writers.values():
                await writer.close()

    async def _publish(self) -> None:
        data = encode(self.catalogue())
        await asyncio.gather(
            *(
                self._try(name, partial(writer.publish, data, self._files))
                for name, writer in self._writers.items()
            )
        )

    async def _try(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        """Log the first failure of a router, and not the next ones."""
        try:
            await call()
            self._away.discard(name)
        except (Unserved, WorkerGone, OSError) as error:
            if name not in self._away:
                log.info("%s: %s", name, error)
            self._away.add(name)
