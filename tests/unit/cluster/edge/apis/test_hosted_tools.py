"""Tools that other servers run: left out and named, or refused."""

from typing import Any

import pytest

from tests.support.cluster.fake_service import FakeService, build_app, call, saying, sources
from tests.unit.cluster.edge.http.test_hints import FLAT_TOOL, with_tools
from tidemill.cluster.cli.serve import endpoint_of
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.settings import HostedTools

HELLO = [{"role": "user", "content": "Hello!"}]
OWN = {"name": "look", "input_schema": {"type": "object"}}
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages": (
        {"messages": HELLO, "tools": [OWN, {"type": "web_search_20250305", "name": "web_search"}]},
        "web_search_20250305",
    ),
    "/v1/responses": (
        {"input": "Hello!", "tools": [FLAT_TOOL, {"type": "web_search"}, {"type": "mcp"}]},
        "web_search",
    ),
}


def answered(path: str, body: dict[str, Any], policy: HostedTools) -> Any:  # noqa: ANN401 - as httpx has it
    limits = EdgeLimits(hosted_tools=policy)
    app = build_app([ServedBackend(FakeService(saying("a")), with_tools())], sources(), limits=limits)
    return call(app, "POST", path, json=body)


@pytest.mark.parametrize("path", BODIES)
def test_hosted_tools_are_left_out_or_refused(path: str) -> None:
    body, kind = BODIES[path]
    ignored = answered(path, body, "ignore")
    assert ignored.status_code == 200
    assert ignored.headers["x-tidemill-ignored"].split(", ")[0] == f"tools.{kind}"
    refused = answered(path, body, "refuse")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(f"tools: '{kind}' does not run on this server")
    own = body | {"tools": body["tools"][:1]}
    assert answered(path, own, "refuse").status_code == 200, "tools of the client are no others"


def test_option_reaches_the_edge() -> None:
    config = RootConfig.model_validate({"models": [{"model": "keeper"}], "edge": {"hosted_tools": "refuse"}})
    assert endpoint_of(config, None, {}).limits.hosted_tools == "refuse"
