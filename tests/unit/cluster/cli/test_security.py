"""Keys and certificates as options of the commands, and rules of SECURITY.md for the whole edge."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
import yaml
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
    saying,
    serving,
)
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.security import KEY_VARIABLE, security_of
from tidemill.cluster.cli.serve import config_of_options
from tidemill.cluster.cli.status import fetch_status
from tidemill.cluster.edge.http.middleware import OPEN_PATHS
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys, digest_of
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.security import Security
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.workers.messages import RequestError, Unserved


def security(*arguments: str, **environ: str) -> Security:
    options = cli.parser().parse_args(["serve", "keeper", *arguments])
    return security_of(config_of_options(options).edge, options.api_key, environ)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Return the paths of PEM files; `client` has a certificate and its key."""
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    paths = {name: str(tmp_path / name) for name in ("certificate", "key", "ca", "client")}
    server.cert_chain_pems[0].write_to_path(paths["certificate"])
    server.private_key_pem.write_to_path(paths["key"])
    client.private_key_and_cert_chain_pem.write_to_path(paths["client"])
    authority.cert_pem.write_to_path(paths["ca"])
    return paths


def test_keys_come_from_options_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [{"tenant": "shop", "sha256": digest_of("c")}]}))
    merged = security("--api-key", "a", "--api-key", "b", "--api-keys-file", str(file), **{KEY_VARIABLE: "d"})
    known = [(key.sha256, key.operator) for key in merged.keys]
    assert known == [(digest_of("a"), True), (digest_of("b"), True), (digest_of("c"), False)]
    assert [key.sha256 for key in security(**{KEY_VARIABLE: "d"}).keys] == [digest_of("d")]
    assert security() == Security()


def test_key_command_prints_entry_for_keys_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["key", "shop"]) == 0
    key, *entry = capsys.readouterr().out.splitlines()
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(["keys:", *entry]))
    (known,) = security("--api-keys-file", str(file)).keys
    assert (known.tenant, known.sha256) == ("shop", digest_of(key))
    assert len(key) > 40
    assert cli.main(["key", "a b"]) == cli.EXIT_REFUSED


def test_wrong_certificate_options_are_named(files: dict[str, str], tmp_path: Path) -> None:
    certificate, key, ca = (files[name] for name in ("certificate", "key", "ca"))
    for arguments, message in (
        (["--ssl-certfile", certificate], "together"),
        (["--ssl-ca-certs", ca], "together"),
        (["--ssl-certfile", "/nowhere", "--ssl-keyfile", key], "--ssl-certfile: there is no file"),
        (["--ssl-certfile", key, "--ssl-keyfile", certificate], "PEM"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-keys-file", str(tmp_path / "none")], "--api-keys-file"),
    ):
        with pytest.raises(TidemillError, match=message):
            security(*arguments)


def edge(security: Security) -> FastAPI:
    return app_over(FakeService(saying(" a")), keys=security.keys)


@pytest.mark.parametrize("mutual", [False, True])
async def test_edge_serves_tls_and_mutual_tls(files: dict[str, str], *, mutual: bool) -> None:
    arguments = ["--ssl-certfile", files["certificate"], "--ssl-keyfile", files["key"]]
    settings = security(*arguments, *(["--ssl-ca-certs", files["ca"]] if mutual else []))
    trusting, known = (ssl.create_default_context(cafile=files["ca"]) for _ in range(2))
    known.load_cert_chain(files["client"])
    async with serving(edge(settings), settings.tls) as url:

        async def is_answered(verify: ssl.SSLContext | bool) -> bool:  # noqa: FBT001 - as httpx has it
            async with httpx.AsyncClient(verify=verify) as client:
                try:
                    return (await client.get(f"{url}/v1/models")).status_code == 200
                except httpx.TransportError:
                    return False

        assert await is_answered(known)
        assert await is_answered(trusting) is not mutual
        assert not await is_answered(verify=True), "it does not trust this authority"


async def test_commands_send_their_api_key(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", files["ca"])
    settings = security(
        "--ssl-certfile", files["certificate"], "--ssl-keyfile", files["key"], "--api-key", "sk-operator"
    )

    async with serving(edge(settings), settings.tls) as url:
        assert await asyncio.to_thread(fetch_status, ServerAddress(url, "sk-operator"))
        for wrong in ("", "sk-other"):
            with pytest.raises(RequestError, match="--api-key"):
                await asyncio.to_thread(fetch_status, ServerAddress(url, wrong))
        with pytest.raises(Unserved):
            await asyncio.to_thread(fetch_status, ServerAddress(url.replace("https", "http"), "sk-operator"))


KEYS = (ApiKey(tenant="people", sha256=digest_of("sk-people"), operator=True),)


def test_every_path_except_open_ones_needs_a_key() -> None:
    app = app_over(FakeService(saying("a")), keys=KEYS)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) > len(OPEN_PATHS) > 4
    for route in routes:
        path = route.path.replace("{name:path}", "a").replace("{name}", "a")
        for method in route.methods or ():
            status = call(app, method, path).status_code
            assert (status == 401) is (path not in OPEN_PATHS), (method, path, status)


tenants = st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True)
salts = st.none() | st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
prompts = st.lists(st.integers(0, 9), min_size=4, max_size=40)


@given(st.tuples(tenants, salts), st.tuples(tenants, salts), prompts)
@settings(max_examples=200, deadline=None)
def test_page_keys_differ_between_tenants_and_salts(
    first: tuple[str, str | None], second: tuple[str, str | None], tokens: list[int]
) -> None:
    def names(caller: tuple[str, str | None]) -> set[bytes]:
        tenant, salt = caller
        keys = ApiKeys([ApiKey(tenant=tenant, sha256=digest_of("sk"))])
        known = caller_of({"authorization": "Bearer sk"}, keys)
        root = Namespace(model="m", layout="l", salt=known.salt_with(salt)).root()
        return set(page_keys(root, tokens, 4))

    is_same = first == second
    assert (names(first) == names(second)) is is_same
    assert names(first).isdisjoint(names(second)) is not is_same
