"""Pages of other sites in a user's browser cannot use a server without keys."""

import httpx
import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tests.unit.cluster.edge.requests.test_api_keys import edge
from tidemill.cluster.edge.http.same_origin import check_site
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
