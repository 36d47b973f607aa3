"""An edge gets a certificate by a token over loopback sockets, renews it, and is refused in one line."""

import asyncio
import ssl
import stat
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import trustme
from cryptography import x509

from tests.support.cluster.fake_engine import FakeEngine
from tests.support.cluster.scripted_engine import FIRST, LAST, WORKER, answer_of, collect, request
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.unit.cluster.rpc.test_mutual_tls import issue, router, status_of
from tests.unit.cluster.rpc.test_router_client import Obedient
from tidemill.cluster.messages import JoinRequest
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.orders import ListEdges, MakeToken, RevokeEdge
from tidemill.cluster.processes.joining import exchange
from tidemill.cluster.processes.joining.authority import (
    CERTIFICATE_S,
    Authority,
    AuthorityError,
    request_of,
    validity,
)
from tidemill.cluster.processes.joining.credentials import Credentials
from tidemill.cluster.processes.joining.exchange import JoinServer
from tidemill.cluster.processes.joining.members import JoiningEdge, JoinRefused, Members
from tidemill.cluster.processes.joining.registry import Registry
from tidemill.cluster.processes.joining.token import Token, TokenError
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc import router_client
from tidemill.cluster.rpc.catalogue_client import CatalogueReader, CatalogueWriter, Expelled
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.worker.server import WorkerServer
from tidemill.workers.messages import RequestError, Unserved, WorkerGone

pytestmark = IN_GRPC_LOOP


@dataclass
class Cluster:
    """A router, the registry of a supervisor and the place to join, with a clock that tests move."""

    folder: Path
    tls: MutualTls
    authority: Authority
    now_s: float = field(default_factory=time.time)
    members: Members = field(default_factory=Members)
    routers: tuple[str, ...] = ()
    join: str = ""
    service: RouterService = field(init=False)

    def write(self, change: Callable[[Members], Members]) -> Members:
        self.members = change(self.members)
        return self.members

    async def join_address(self) -> str:
        return self.join

    async def addresses(self) -> tuple[str, ...]:
        return self.routers

    @property
    def registry(self) -> Registry:
        return Registry(
            self.write, lambda: self.authority, lambda: self.now_s, self.join_address, self.addresses
        )

    async def token(self, name: str = "web-1", life_s: float = 600.0) -> Token:
        order = MakeToken(name, life_s)
        return Token.parse((await self.registry.carry_out(order)).token)

    def credentials(self, token: Token, folder: str = "edge") -> Credentials:
        return Credentials(
            addresses=(self.join,),
            token=token,
            folder=self.folder / folder,
            unix_time_s=lambda: self.now_s,
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Cluster"]:
        self.service = RouterService(Router(asyncio.get_running_loop().time), self.tls, Obedient())
        server = JoinServer(self.registry.join, self.tls)
        self.routers = (await self.service.start("127.0.0.1"),)
        self.join = await server.start("127.0.0.1", 0)
        try:
            yield self
        finally:
            await server.stop()
            await self.service.stop()

    @asynccontextmanager
    async def joined(self) -> AsyncGenerator[Credentials]:
        async with self.running():
            credentials = self.credentials(await self.token())
            await credentials.join()
            yield credentials


def cluster_in(folder: Path) -> Cluster:
    ca = trustme.CA()
    tls = issue(folder / "node", ca)
    key = folder / "ca.key"
    ca.private_key_pem.write_to_path(str(key))
    return Cluster(folder, tls, Authority(key, tls.ca))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return cluster_in(tmp_path)


async def test_token_gets_a_certificate_of_a_client_alone(cluster: Cluster) -> None:
    async with cluster.joined() as credentials:
        assert credentials.routers == cluster.routers
        await status_of(cluster.routers[0], credentials.tls)
        [serial] = cluster.members.edges["web-1"].serials
        known = x509.load_pem_x509_certificate(credentials.tls.certificate.read_bytes())
        assert f"{known.serial_number:x}" == serial
        assert stat.S_IMODE(credentials.tls.key.stat().st_mode) == 0o600
        assert stat.S_IMODE(credentials.folder.stat().st_mode) == 0o700
        await cluster.credentials(credentials.token).join()  # with the files that are there
        # It cannot be the server of a connection: no process of the cluster takes it for a router.
        async with router(credentials.tls) as address:
            reader = CatalogueReader((address,), cluster.tls)
            with pytest.raises(Unserved, match="has no catalogue"):
                await reader.changed()
            await reader.close()


async def test_edge_may_do_nothing_that_is_the_servers(cluster: Cluster) -> None:
    async with cluster.joined() as credentials:
        client = RouterClient(always_at(cluster.routers[0]), tls=credentials.tls)
        for order in (ListEdges(), MakeToken("web-2", 60.0), RevokeEdge("web-1")):
            with pytest.raises(RequestError, match="may not do this") as refused:
                await client.carry_out(order)
            assert refused.value.status == 403
        await client.close()
        writer = CatalogueWriter(always_at(cluster.routers[0]), credentials.tls)
        with pytest.raises(Unserved, match="may not do this"):
            await writer.publish(b"", {})


async def test_nothing_is_sent_to_a_cluster_that_shows_the_authority_of_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    """An attacker between edge and cluster knows the authority's certificate, and has none by it."""
    (tmp_path / "attacker").mkdir()
    attacker = cluster_in(tmp_path / "attacker")
    asked: list[object] = []

    async def take(request: object) -> None:
        asked.append(request)

    async with cluster.running():
        token = await cluster.token()
    server = JoinServer(take, replace(attacker.tls, ca=cluster.tls.ca))  # pyrefly: ignore[bad-argument-type]  it answers nothing
    cluster.join = await server.start("127.0.0.1", 0)
    for sent, line in (
        (token, "no certificate of the authority"),
        (replace(token, fingerprint="0" * 64), "nothing was sent"),
    ):
        credentials = cluster.credentials(sent)
        with pytest.raises(JoinRefused, match=line):
            await credentials.join()
        assert not credentials.tls.certificate.exists()
    await server.stop()
    assert not asked


async def test_certificate_is_renewed_before_its_end_and_not_when_revoked(
    cluster: Cluster,
) -> None:
    async with cluster.running():
        cluster.now_s -= 0.75 * CERTIFICATE_S
        credentials = cluster.credentials(await cluster.token())
        await credentials.join()
        first = credentials.tls.certificate.read_bytes()
        end_s = validity(first)[1]
        cluster.now_s += 0.75 * CERTIFICATE_S
        renewing = asyncio.create_task(credentials.renew())
        async with asyncio.timeout(30):
            while credentials.tls.certificate.read_bytes() == first:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not renewing.done()
        renewing.cancel()
        second_s = validity(credentials.tls.certificate.read_bytes())[1]
        assert second_s > end_s
        assert len(cluster.members.edges["web-1"].serials) == 2
        await status_of(cluster.routers[0], credentials.tls)
        await cluster.registry.carry_out(RevokeEdge("web-1"))
        assert len(cluster.members.revoked) == 2
        cluster.now_s = second_s - 10.0
        with pytest.raises(JoinRefused, match="revoked"):
            await credentials.renew()


async def test_revoked_certificate_is_refused_and_ends_open_calls(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "STATUS_WAIT_S_MAX", 0.5)

    async with cluster.joined() as credentials:
        reader = CatalogueReader(cluster.routers, credentials.tls)
        waiting = asyncio.create_task(reader.changed())
        await status_of(cluster.routers[0], credentials.tls)
        await cluster.registry.carry_out(RevokeEdge("web-1"))
        cluster.service.revoke(cluster.members.revoked)
        with pytest.raises(Unserved, match="was revoked"):
            await status_of(cluster.routers[0], credentials.tls)
        with pytest.raises(Expelled, match="was revoked"):
            await waiting
        await reader.close()
        await status_of(cluster.routers[0], cluster.tls)


async def test_worker_ends_the_streams_of_a_revoked_certificate(cluster: Cluster) -> None:
    async with cluster.joined() as credentials:
        engine = FakeEngine()
        plane = WorkerServer(engine, WORKER, tls=cluster.tls)
        address = await plane.start("127.0.0.1")
        revoked, ours = WorkerClients(tls=credentials.tls), WorkerClients(tls=cluster.tls)
        ending = asyncio.create_task(collect(answer_of(revoked, request("a"), address)))
        going_on = asyncio.create_task(collect(answer_of(ours, request("b"), address)))
        await engine.until(lambda seen: len(seen.calls) == 2)
        plane.revoke(cluster.members.edges["web-1"].serials)
        with pytest.raises(WorkerGone):
            await ending
        with pytest.raises(WorkerGone):
            await collect(answer_of(revoked, request("c"), address))
        engine.step(("b", FIRST), ("b", LAST))
        assert await going_on == [FIRST, LAST]
        for clients in (revoked, ours):
            await clients.close()
        await plane.stop()


async def test_strangers_get_the_authority_and_nothing_else(cluster: Cluster) -> None:
    async with cluster.running():
        host, port = cluster.join.split(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for sent in (b"", b"\x00\x00\x00\x04junk", b"\xff\xff\xff\xff" + b"x" * 100):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(sent)
            if not sent:
                writer.close()
            assert not await reader.read()
            writer.close()
        await cluster.credentials(await cluster.token()).join()


def test_key_of_another_authority_and_text_that_is_no_token_are_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = tmp_path / "other.key"
    trustme.CA().private_key_pem.write_to_path(str(other))
    for key, line in ((other, "is the key of no certificate"), (tmp_path / "none", "not a key")):
        with pytest.raises(AuthorityError, match=line):
            Authority(key, cluster.tls.ca)
    for text in ("", "a.b.c", "sk-key", "AAAAAA." + "x" * 32 + "." + "0" * 64):
        with pytest.raises(TokenError, match="tidemill join-token"):
            Token.parse(text)


SECRET = "s" * 32
DAY_S = 86_400.0


def member(name: str = "aaaaaa", until_s: float = 100.0) -> JoiningEdge:
    return JoiningEdge(token=name, secret_sha256=sha256(SECRET.encode()).hexdigest(), until_s=until_s)


def joined(now_s: float = 10.0) -> Members:
    members = Members().with_token("web-1", member(), 0.0)
    name, members = members.admitted("aaaaaa", SECRET, "key", now_s)
    return members.certified(name, "abcdef0123", now_s + DAY_S, now_s)


@pytest.mark.parametrize(
    ("token", "secret", "key", "now_s", "line"),
    [
        ("bbbbbb", SECRET, "key", 10.0, "not one of this cluster"),
        ("aaaaaa", "t" * 32, "key", 10.0, "not one of this cluster"),
        ("aaaaaa", "", "key", 10.0, "not one of this cluster"),
        ("aaaaaa", SECRET, "another", 10.0, "was used by another edge"),
        ("aaaaaa", SECRET, "key", 100.0, "has expired"),
    ],
)
def test_token_is_refused_in_one_line(token: str, secret: str, key: str, now_s: float, line: str) -> None:
    with pytest.raises(JoinRefused, match=line) as refused:
        joined().admitted(token, secret, key, now_s)
    assert "tidemill join-token" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_revoked_edge_gets_nothing_more() -> None:
    members = joined()
    assert members.admitted("aaaaaa", SECRET, "key", 20.0) == ("web-1", members), "its answer was lost"
    assert members.renewing("abcdef0123", "key") == "web-1"
    for serial, key in (("abcdef0123", "another"), ("ffffffff", "key"), ("", "key")):
        with pytest.raises(JoinRefused):
            members.renewing(serial, key)
    members = members.without("web-1", 20.0)
    assert members.revoked == {"abcdef0123": 10.0 + DAY_S}
    assert msgspec.json.decode(msgspec.json.encode(members), type=Members) == members, "in the journal"
    with pytest.raises(JoinRefused, match="was revoked"):
        members.admitted("aaaaaa", SECRET, "key", 20.0)
    with pytest.raises(JoinRefused, match="was revoked"):
        members.renewing("abcdef0123", "key")
    again = members.with_token("web-1", member("cccccc", 200.0), 30.0)
    assert again.revoked == members.revoked, "a new token brings no certificate back"
    unused = Members().with_token("web-1", member(), 0.0).without("web-1", 1.0)
    with pytest.raises(JoinRefused, match="was revoked"):
        unused.admitted("aaaaaa", SECRET, "key", 2.0)


@pytest.mark.parametrize("serial", ["abcdef0123", "AB:CD:EF:01:23", "0abcdef0123"])
def test_serial_of_an_edge_revokes_the_edge(serial: str) -> None:
    members = joined().certified("web-1", "99999999", 5 * DAY_S, 20.0).without(serial, 30.0)
    assert members.edges["web-1"].revoked
    assert members.revoked.keys() == {"abcdef0123", "99999999"}


def test_other_certificates_are_revoked_by_serial_for_good() -> None:
    members = Members().without("0123456789abcdef", 0.0)
    assert members.revoked == {"123456789abcdef": 0.0}
    assert members.without("1111111111", 1000 * DAY_S).revoked.keys() == {"123456789abcdef", "1111111111"}
    with pytest.raises(RequestError, match="neither an edge") as refused:
        members.without("web-7", 0.0)
    assert refused.value.status == 404


def test_name_is_in_use_until_everything_has_expired() -> None:
    with pytest.raises(RequestError, match="has a token or a certificate") as refused:
        joined().with_token("web-1", member("cccccc"), 20.0)
    assert refused.value.status == 409
    later = joined().with_token("web-1", member("cccccc"), 20.0 + DAY_S)
    assert later.edges["web-1"] == member("cccccc")
    for name in ("", "Web", "a b", "-a", "a" * 64):
        with pytest.raises(RequestError, match="no name of an edge"):
            Members().with_token(name, member(), 0.0)


def test_what_has_expired_is_forgotten() -> None:
    members = joined().without("web-1", 20.0).with_token("web-2", member("dddddd"), 10 * DAY_S)
    assert members.edges.keys() == {"web-2"}
    assert not members.revoked


@pytest.mark.parametrize("handshaken", [False, True])
async def test_strangers_leave_room_for_those_that_join_and_renew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, handshaken: bool
) -> None:
    """Silent connections, and exchanges that are held: an address has half of what others leave, and a
    renewal has places of its own."""
    monkeypatch.setattr(exchange, "CONNECTIONS_MAX", 32)
    monkeypatch.setattr(exchange, "EXCHANGES_MAX", 4)
    public = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    public.check_hostname, public.verify_mode = False, ssl.CERT_NONE
    async with cluster.joined() as credentials, asyncio.timeout(30):
        host, _, port = cluster.join.rpartition(":")
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(40):
            with suppress(OSError):
                context = public if handshaken else None
                there = ("127.0.0.2", 0)
                held.append(await asyncio.open_connection(host, int(port), ssl=context, local_addr=there))
        await asyncio.sleep(0.2)
        kept = sum(not reader.at_eof() and reader.exception() is None for reader, _ in held)
        assert kept == (2 if handshaken else 16)
        await cluster.credentials(await cluster.token("web-2"), "second").join()
        renewal = JoinRequest(request=request_of(credentials.tls.key.read_bytes()))
        assert (await exchange.ask(cluster.join, credentials.tls.client(), renewal)).certificate
        for _, writer in held:
            writer.close()
