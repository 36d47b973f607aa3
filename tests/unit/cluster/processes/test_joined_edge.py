"""The catalogue that an edge gets, its files, and the ports of routers."""

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.cluster.fake_engine import worker
from tests.support.cluster.fake_service import sources
from tests.support.cluster.heartbeats import worker_info
from tidemill.cluster.cli.serve import routers_of
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer, tokenizer_files
from tidemill.cluster.edge.cluster_service import ClusterService
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.context import open_context
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.processes.endpoint.endpoint import PortTaken, with_router_ports
from tidemill.cluster.processes.joined_edge import keys_of, limits_of
from tidemill.cluster.processes.publisher import CataloguePublisher, PublishedFleet
from tidemill.cluster.rpc.catalogue import Catalogue, CatalogueKey
from tidemill.cluster.rpc.codec import decode, encode
from tidemill.cluster.settings import (
    ChatSettings,
    ClusterSettings,
    FleetSettings,
    RouterSettings,
)
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.sources.names import bundled

KEY = "sk-never-to-be-published"
FOLDER = bundled()["keeper"]


def fleet_of(router: RouterSettings, chat: ChatSettings = ChatSettings()) -> FleetSettings:  # noqa: B008 - frozen
    mixed = worker("mixed-0", "mixed", model_folder=FOLDER)
    return FleetSettings(workers=(mixed,), names=("keeper", "alias"), router=router, chat=chat)


def test_catalogue_has_digests_and_no_secret(tmp_path: Path) -> None:
    tls = MutualTls(certificate=tmp_path / "c.pem", key=tmp_path / "k.pem", ca=tmp_path / "ca.pem")
    for path in (tls.certificate, tls.key, tls.ca):
        path.write_text(f"secret of {path.name}")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    model = SimpleNamespace(name="keeper", max_model_len=700, created_s=5)
    service = cast("ClusterService", SimpleNamespace(info=worker_info(), model=model, resets=3))
    fleet = fleet_of(RouterSettings(replicas=2, tls=tls), ChatSettings(template=str(template)))
    key = ApiKey(tenant="search", sha256=digest_of(KEY), requests_per_minute=5)
    writers: Any = {"router": SimpleNamespace(address="10.0.0.1:1"), "router-1": SimpleNamespace(address="")}
    context = open_context([], sources(), keys=[key])
    publisher = CataloguePublisher([PublishedFleet(fleet, service)], writers, context, Telemetry())
    data = encode(publisher.catalogue())
    for secret in (KEY, "secret of", "k.pem", str(FOLDER)):
        assert secret.encode() not in data
    catalogue = decode(Catalogue, data)
    [entry] = catalogue.models
    assert entry.routers == ("10.0.0.1:1",), "a router without a known address is left out"
    assert entry.info.max_model_len == 700
    assert entry.chat.template == template.read_text()
    assert set(entry.files) == set(tokenizer_files(FOLDER))
    assert catalogue.resets == {"keeper": 3}
    assert keys_of(catalogue) == [key]
    assert limits_of(catalogue.limits) == EdgeLimits()


def test_limits_of_another_version_are_left_out_and_keys_are_checked() -> None:
    assert limits_of({"answers_max": 7, "of_the_next_version": 1}) == EdgeLimits(answers_max=7)
    with pytest.raises(ValueError, match="sha256"):
        keys_of(Catalogue(models=(), keys=(CatalogueKey(tenant="a", sha256="short"),)))


def test_tokenizer_of_the_published_files_is_that_of_the_folder(tmp_path: Path) -> None:
    for name, path in tokenizer_files(FOLDER).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(path.read_bytes())
    text = "The keeper <|end|> said:\n\t1,000 times"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(FOLDER).encode(text)


def test_each_router_keeps_a_port_of_its_own() -> None:
    first = fleet_of(RouterSettings(replicas=3))
    second = fleet_of(RouterSettings(name="b-router", replicas=2))
    settings = with_router_ports(ClusterSettings(fleets=(first, second)))
    ports = [port for fleet in settings.fleets for port in fleet.router.ports]
    assert len(set(ports)) == 5
    router = settings.fleets[0].router
    assert [router.port_of(name) for name in router.names] == list(router.ports)
    assert RouterSettings().port_of("router") == 0


def test_taken_router_port_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        router = RouterSettings(ports=(other.getsockname()[1],))
        settings = ClusterSettings(fleets=(fleet_of(router),))
        with pytest.raises(PortTaken, match="--router-port"):
            with_router_ports(settings)
        free = replace(settings, fleets=(fleet_of(RouterSettings()),))
        assert with_router_ports(free).fleets[0].router.ports != router.ports


def test_join_takes_addresses() -> None:
    assert routers_of("10.0.0.1:20000, [::1]:2") == ("10.0.0.1:20000", "[::1]:2")
    for text in ("", "host", ":1", "host:port", "host:0", "host:65536", "a:1,"):
        with pytest.raises(TidemillError, match="--join"):
            routers_of(text)
