"""Certificates between the processes of a cluster: a process without one is refused."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.cluster.fake_engine import FakeEngine
from tests.support.cluster.scripted_engine import (
    FIRST,
    LAST,
    answer_of,
    collect,
    frontend,
    request,
    serving,
)
from tests.support.grpc_loop import IN_GRPC_LOOP
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.security import with_cluster_security
from tidemill.cluster.cli.serve import config_of_options
from tidemill.cluster.config.fleets import Surroundings, cluster_settings
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc import router_client
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.cluster.settings import ClusterSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved, WorkerGone

pytestmark = IN_GRPC_LOOP


def issue(folder: Path, authority: trustme.CA, *names: str) -> MutualTls:
    """Files of a process that has a certificate by `authority`."""
    folder.mkdir()
    tls = MutualTls(certificate=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    mine = authority.issue_cert(*(names or [CLUSTER_NAME]))
    mine.cert_chain_pems[0].write_to_path(str(tls.certificate))
    mine.private_key_pem.write_to_path(str(tls.key))
    authority.cert_pem.write_to_path(str(tls.ca))
    return tls


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ours(authority: trustme.CA, tmp_path: Path) -> MutualTls:
    return issue(tmp_path / "ours", authority)


@asynccontextmanager
async def router(
    tls: MutualTls | None = None,
    port: int = 0,
    served: Router | None = None,
    supervisor: Any = None,  # noqa: ANN401
) -> AsyncGenerator[str]:
    """Yield the address of a router."""
    service = RouterService(served or Router(asyncio.get_running_loop().time), tls, supervisor)
    try:
        yield await service.start("127.0.0.1", port)
    finally:
        await service.stop()


async def generates(address: str, engine: FakeEngine, tls: MutualTls | None) -> None:
    """One request over the data plane. Raises WorkerGone."""
    async with frontend(tls=tls) as peers:
        collecting = asyncio.create_task(collect(answer_of(peers, request(), address)))
        begun = asyncio.create_task(engine.until(lambda seen: bool(seen.calls)))
        await asyncio.wait({collecting, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if not collecting.done():
            engine.step(("r", FIRST), ("r", LAST))
        assert await collecting == [FIRST, LAST]


async def status_of(address: str, tls: MutualTls | None) -> None:
    """Asks a router. Raises Unserved."""
    client = RouterClient(always_at(address), tls=tls)
    try:
        assert (await client.status()).workers == ()
    finally:
        await client.close()


async def test_processes_of_a_cluster_connect_to_no_others(
    authority: trustme.CA, ours: MutualTls, tmp_path: Path
) -> None:
    async with serving(tls=ours) as (engine, address):
        await generates(address, engine, ours)
    async with router(ours) as address:
        await status_of(address, ours)
    for theirs in (None, issue(tmp_path / "elsewhere", authority, "elsewhere")):
        async with serving(tls=theirs) as (engine, address):
            with pytest.raises(WorkerGone):
                await generates(address, engine, ours)
            assert not engine.begun


async def test_stranger_is_refused(ours: MutualTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "STATUS_WAIT_S_MAX", 0.5)
    certified = replace(issue(tmp_path / "theirs", trustme.CA()), ca=ours.ca)
    async with serving(tls=ours) as (engine, plane), router(ours) as address:
        for stranger in (None, certified, replace(ours, key=tmp_path / "nowhere")):
            with pytest.raises(WorkerGone):
                await generates(plane, engine, stranger)
            assert not engine.begun
            with pytest.raises(Unserved):
                await status_of(address, stranger)


async def test_new_files_count_from_the_next_connection_on(
    ours: MutualTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "STATUS_WAIT_S_MAX", 0.5)

    async with router(ours) as address:
        await status_of(address, ours)
        renewed = issue(tmp_path / "renewed", trustme.CA())
        for path in ("certificate", "key", "ca"):
            getattr(ours, path).write_bytes(getattr(renewed, path).read_bytes())
        with pytest.raises(Unserved):
            await status_of(address, ours)
    async with router(ours) as address:
        await status_of(address, ours)


def clustered(*arguments: str) -> ClusterSettings:
    """Return the settings that `tidemill serve` makes of these options."""
    config = config_of_options(cli.parser().parse_args(["serve", "keeper", *arguments]))
    around = Surroundings(store_url="file:///nowhere", cache_folder=Path("/nowhere"))
    return with_cluster_security(cluster_settings(config, around), config.cluster)


def options_of(tls: MutualTls) -> list[str]:
    return [
        f"--cluster-ssl-certfile={tls.certificate}",
        f"--cluster-ssl-keyfile={tls.key}",
        f"--cluster-ssl-ca-certs={tls.ca}",
    ]


def test_routers_and_workers_listen_on_loopback_by_default(ours: MutualTls) -> None:
    for arguments, host, tls in (
        ([], "127.0.0.1", None),
        (["--ray-address", "auto"], "127.0.0.1", None),
        (options_of(ours), "127.0.0.1", ours),
        (["--cluster-host", "node", *options_of(ours)], None, ours),
        (["--cluster-host", "node-plain"], None, None),
    ):
        (fleet,) = clustered(*arguments).fleets
        assert {(settings.host, settings.tls) for settings in (fleet.router, *fleet.workers)} == {(host, tls)}


def test_unusable_options_are_refused_before_anything_starts(
    authority: trustme.CA, ours: MutualTls, tmp_path: Path
) -> None:
    theirs = issue(tmp_path / "theirs", trustme.CA())
    for arguments, message in (
        (["--cluster-host", "node"], "--cluster-ssl-certfile"),
        (options_of(ours)[:2], "ssl_ca_certs is missing"),
        (options_of(replace(ours, key=tmp_path / "nowhere")), "there is no file"),
        (options_of(replace(ours, ca=theirs.ca)), "cannot connect to each other"),
        (options_of(replace(ours, key=theirs.key)), "cannot connect to each other"),
        (options_of(replace(ours, key=ours.ca)), "cannot connect to each other"),
        (options_of(issue(tmp_path / "named", authority, "elsewhere")), "cannot connect to each other"),
    ):
        with pytest.raises(TidemillError, match=message):
            clustered(*arguments)
