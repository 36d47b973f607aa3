"""The catalogue over loopback sockets: published, watched, read from another router, and refused."""

import asyncio
import datetime as dt
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import trustme

from tests.support.cluster.heartbeats import worker_info
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.sockets import free_port
from tests.unit.cluster.rpc.test_mutual_tls import issue, router
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls, refusal_of
from tidemill.cluster.router import catalogue_server
from tidemill.cluster.router.catalogue_server import CatalogueServer
from tidemill.cluster.rpc.catalogue import Catalogue, CatalogueKey, CatalogueModel
from tidemill.cluster.rpc.catalogue_client import PART_BYTES, CatalogueReader, CatalogueWriter
from tidemill.cluster.rpc.codec import Malformed, encode
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.workers.messages import Unserved

pytestmark = IN_GRPC_LOOP

FILES = {sha256(body).hexdigest(): body for body in (b"", b"{}", b"tokens" * PART_BYTES)}
MODEL = CatalogueModel(
    names=("keeper", "alias"),
    info=worker_info(),
    created_s=7,
    routers=(),
    files=dict(zip(("chat_template.jinja", "config.json", "tokenizer.json"), FILES, strict=True)),
    ttft_s_max=float("inf"),
)
WHOLE = Catalogue(
    models=(MODEL,),
    limits={"answers_max": 4, "send_s_max": 2.5, "allowed_origins": ("*",), "allow_credentials": True},
)
WITH_KEY = replace(WHOLE, keys=(CatalogueKey(tenant="search", sha256="0" * 64),))


@asynccontextmanager
async def reading(*addresses: str, tls: MutualTls | None = None) -> AsyncGenerator[CatalogueReader]:
    reader = CatalogueReader(addresses, tls)
    try:
        yield reader
    finally:
        await reader.close()


async def publish(address: str, catalogue: Catalogue, tls: MutualTls | None = None) -> None:
    writer = CatalogueWriter(always_at(address), tls)
    try:
        await writer.publish(encode(catalogue), FILES)
    finally:
        await writer.close()


async def test_reader_gets_catalogue_and_files_of_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send_nothing(*_: object) -> bytes:
        return b""

    async with router() as address, reading(address) as reader:
        await publish(address, WHOLE)
        catalogue = await reader.changed()
        assert catalogue is not None
        [model] = catalogue.models
        assert (model.names, model.info.page_tokens) == (MODEL.names, MODEL.info.page_tokens)
        assert catalogue.limits == WHOLE.limits
        for digest in model.files.values():
            assert await reader.file(digest) == FILES[digest]
        with pytest.raises(Unserved, match="no such file"):
            await reader.file("0" * 64)
        monkeypatch.setattr(CatalogueServer, "_get_part", send_nothing)
        async with router() as other, reading(other) as second:
            await publish(other, WHOLE)
            with pytest.raises(Unserved, match="another file"):
                await second.file(sha256(b"{}").hexdigest())


async def test_change_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_server, "CATALOGUE_WAIT_S", 600.0)

    async with router() as address, reading(address) as reader:
        await publish(address, WHOLE)
        await reader.changed()
        waiting = asyncio.create_task(reader.changed())
        await publish(address, WHOLE)  # the same again is no change
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await publish(address, WITH_KEY)
        changed = await waiting
        assert changed is not None
        assert changed.keys == WITH_KEY.keys


async def test_reader_goes_to_the_next_router_and_to_one_that_has_restarted() -> None:
    async with router() as second:
        port = free_port()
        known = replace(WHOLE, models=(replace(MODEL, routers=(f"127.0.0.1:{port}", second)),))
        await publish(second, known)
        async with reading(f"127.0.0.1:{port}") as reader:
            async with router(port=port) as first:
                await publish(first, known)
                assert await reader.changed() is not None
            with pytest.raises(Unserved):
                await reader.changed()
            assert reader.address == second
            await publish(second, WITH_KEY)
            changed = await reader.changed()
            assert changed is not None
            assert changed.keys == WITH_KEY.keys
        async with router(port=port) as first, reading(first) as reader:
            watching = asyncio.create_task(reader.changed())
            await publish(first, known)
            assert await watching is not None


async def test_catalogue_without_its_files_is_not_served() -> None:
    server = CatalogueServer()
    data = encode(WHOLE)
    assert server.publish(data) == sorted(FILES)
    for digest, body in FILES.items():
        server.put_part(digest, 0, len(body), body)
    assert server.publish(data) == []
    without = replace(WHOLE, models=(replace(MODEL, files={"a": "0" * 64}),))
    assert server.publish(encode(without)) == ["0" * 64]
    assert await server.newer(b"") == data
    known = sha256(b"{}").hexdigest()
    for digest, start, size, part in (
        ("0" * 64, 0, 2, b"{}"),  # another file
        (known, 1, 2, b"}"),  # its beginning is missing
        (known, 0, 1, b"{}"),  # longer than announced
        (known, 0, 1 << 40, b"{"),
    ):
        with pytest.raises(Malformed):
            CatalogueServer().put_part(digest, start, size, part)


async def test_process_without_a_valid_certificate_gets_nothing(tmp_path: Path) -> None:
    authority = trustme.CA()
    ours = issue(tmp_path / "ours", authority)
    expired = replace(ours, certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    old = authority.issue_cert(CLUSTER_NAME, not_after=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    old.cert_chain_pems[0].write_to_path(str(expired.certificate))
    old.private_key_pem.write_to_path(str(expired.key))
    foreign = replace(issue(tmp_path / "theirs", trustme.CA()), ca=ours.ca)

    async with router(tls=ours) as address:
        await publish(address, WHOLE, ours)
        for stranger in (None, expired, foreign):
            async with reading(address, tls=stranger) as reader:
                with pytest.raises(Unserved):
                    await reader.changed()
            with pytest.raises(Unserved):
                await publish(address, WITH_KEY, stranger)
            refusal = await asyncio.to_thread(refusal_of, address, stranger)
            assert refusal is not None
            assert "--cluster-ssl-certfile" in refusal
        assert await asyncio.to_thread(refusal_of, address, ours) is None
        async with reading(address, tls=ours) as reader:
            catalogue = await reader.changed()
            assert catalogue is not None
            assert not catalogue.keys
    async with router() as address:
        assert await asyncio.to_thread(refusal_of, address, None) is None
        assert "has no certificate" in (await asyncio.to_thread(refusal_of, address, ours) or "")
    assert await asyncio.to_thread(refusal_of, address, ours) is None, "there is no process"
