"""Pages of other sites in a user's browser cannot use a server without keys."""

import asyncio
from contextlib import nullcontext

import httpx
import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tests.unit.cluster.edge.requests.test_api_keys import KEYS, edge
from tidemill.cluster.edge.http.same_origin import check_operator, check_site, open_line
from tidemill.cluster.edge.requests.api_keys import ApiKeys
from tidemill.workers.messages import RequestError

BODY = {"prompt": "a", "max_tokens": 1}
OURS = "http://t"
"""The address by which tests call the server."""


def ask(method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    more = {"json": BODY} if path == "/v1/completions" else {}
    return call(app_over(FakeService(saying("a"))), method, path, headers=headers, **more)


@pytest.mark.parametrize("path", ["/v1/completions", "/reset_prefix_cache", "/cluster/drain"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "https://t.evil.example", "http://t:81"]
)
def test_page_of_another_site_gives_no_orders(path: str, origin: str) -> None:
    reply = ask("POST", path, {"origin": origin, "host": "t"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "foreign_origin")
    assert "--api-key" in reply.json()["error"]["message"]


def test_our_own_page_and_clients_without_a_page_do() -> None:
    for headers in ({"origin": OURS, "host": "t"}, {"host": "t"}, {"origin": "https://t", "host": "t"}):
        assert ask("POST", "/v1/completions", headers).status_code == 200
    evil = {"origin": "http://evil.example"}
    assert ask("GET", "/v1/models", evil).status_code == 200, "it cannot read that"
    with_key = {**evil, "authorization": "Bearer sk-one"}
    reply = call(edge(FakeService(saying("a"))), "POST", "/v1/completions", headers=with_key, json=BODY)
    assert reply.status_code == 200, "only keys count on a server with keys"


@pytest.mark.parametrize("server", ["127.0.0.1", "::1", "127.8.8.8"])
@pytest.mark.parametrize(
    ("host", "knows"),
    [
        ("localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("page.localhost", True),
        ("", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("10.0.0.1", False),
        ("[", False),
    ],
)
def test_on_loopback_it_answers_to_no_other_name(server: str, host: str, *, knows: bool) -> None:
    for method in ("GET", "POST"):
        if knows:
            check_site(method, server, {"host": host})
        else:
            with pytest.raises(RequestError) as refused:
                check_site(method, server, {"host": host})
            assert (refused.value.status, refused.value.code) == (403, "unknown_host")


@pytest.mark.parametrize("server", ["10.0.0.1", "gpu-box", ""])
def test_elsewhere_it_has_the_names_that_people_give_it(server: str) -> None:
    check_site("POST", server, {"host": "gpu-box.example:8000"})


@pytest.mark.parametrize(
    ("method", "path", "is_order"),
    [
        ("POST", "/cluster/scale", True),
        ("POST", "/flush_cache", True),
        ("DELETE", "/cluster/edges/a", True),
        ("GET", "/cluster/support/logs", True),
        ("GET", "/cluster/edges", True),
        ("GET", "/cluster", False),
        ("GET", "/server_info", False),
        ("POST", "/v1/completions", False),
    ],
)
def test_without_keys_orders_come_from_the_own_machine(method: str, path: str, *, is_order: bool) -> None:
    """The server was reached as 10.0.0.5: only a client on its machine has that address, too."""
    for client in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.5", ""):
        check_operator(method, path, "10.0.0.5", client)
    for client in ("10.0.0.6", "::ffff:10.0.0.6", "fe80::1"):
        with pytest.raises(RequestError, match="--api-keys-file") if is_order else nullcontext():
            check_operator(method, path, "10.0.0.5", client)


def test_stranger_without_a_key_gives_no_orders_and_one_with_keys_may() -> None:
    async def ask_from(app: FastAPI, headers: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("10.0.0.6", 5))
        async with httpx.AsyncClient(transport=transport, base_url=OURS) as client:
            return await client.post("/reset_prefix_cache", headers=headers)

    reply = asyncio.run(ask_from(app_over(FakeService(saying("a"))), {}))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_an_operator")
    operator = {"authorization": "Bearer sk-people"}
    assert asyncio.run(ask_from(edge(FakeService(saying("a"))), operator)).status_code == 200


def test_one_line_names_an_open_endpoint_and_the_fix() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.5"):  # noqa: S104 - no socket
        assert "--api-keys-file" in (open_line(host, ApiKeys()) or "")
        assert open_line(host, ApiKeys(KEYS)) is None
    assert not any(open_line(host, ApiKeys()) for host in ("127.0.0.1", "::1", "localhost"))
