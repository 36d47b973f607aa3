"""Rules of SECURITY.md for the whole edge: paths need keys, limits hold, tenants share no page."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from tests.support.cluster.fake_service import FakeService, build_app, call, saying, sources, tokenizer
from tidemill.cluster.edge.http.middleware import OPEN_PATHS
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys, digest_of
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.kvstore.keys import Namespace, page_keys

KEYS = (ApiKey(tenant="people", sha256=digest_of("sk-people"), operator=True),)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello!"}


def test_every_path_except_open_ones_needs_a_key() -> None:
    app = build_app([ServedBackend(FakeService(saying("a")), tokenizer())], sources(), keys=KEYS)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) > len(OPEN_PATHS) > 4
    for route in routes:
        path = route.path.replace("{name:path}", "a").replace("{name}", "a")
        for method in route.methods or ():
            status = call(app, method, path).status_code
            assert (status == 401) is (path not in OPEN_PATHS), (method, path, status)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


LIMITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (TEXT, {"n": 16}, {"n": 17}),
    (TEXT, {"prompt": ["a"] * 64}, {"prompt": ["a"] * 65}),
    (TEXT, {"prompt": ["a"] * 8, "n": 16}, {"prompt": ["a"] * 9, "n": 16}),
    (TEXT, {"prompt": [5] * 511, "max_tokens": 1}, {"prompt": [5] * 512, "max_tokens": 1}),
    (TEXT, {"logprobs": 20}, {"logprobs": 21}),
    (TEXT, {"stop": ["x"] * 4}, {"stop": ["x"] * 5}),
    (TEXT, {"stop": "x" * 256}, {"stop": "x" * 257}),
    (TEXT, {"stop_token_ids": [5] * 64}, {"stop_token_ids": [5] * 65}),
    (TEXT, {"logit_bias": {"5": 100}}, {"logit_bias": {"5": 100.5}}),
    (TEXT, {"priority": -100}, {"priority": -101}),
    (TEXT, {"cache_salt": "s" * 128}, {"cache_salt": "s" * 129}),
    (TEXT, {"model": "keeper"}, {"model": "k" * 257}),
    (
        TEXT,
        {"structured_outputs": {"regex": "a" * (4 << 10)}},
        {"structured_outputs": {"regex": "a" * ((4 << 10) + 1)}},
    ),
    (TEXT, {"structured_outputs": {"json": nested(64)}}, {"structured_outputs": {"json": nested(65)}}),
    (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}),
]


@pytest.mark.parametrize(
    ("path", "most", "more"), LIMITS, ids=[json.dumps(limit[1])[:40] for limit in LIMITS]
)
def test_request_is_accepted_up_to_its_limit(path: str, most: dict[str, Any], more: dict[str, Any]) -> None:
    service = FakeService(saying("a"))
    app = build_app([ServedBackend(service, tokenizer())], sources())
    base: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
    assert call(app, "POST", path, json={**base, **more}).status_code == 400
    assert not service.requests
    assert call(app, "POST", path, json={**base, **most}).status_code == 200
    assert service.requests


@pytest.mark.parametrize(
    "field", ["kv_transfer_params", "prompt_embeds", "chat_template", "logits_processors", "documents"]
)
def test_fields_that_reach_into_server_are_refused(field: str) -> None:
    service = FakeService(saying("a"))
    app = build_app([ServedBackend(service, tokenizer())], sources())
    reply = call(app, "POST", CHAT, json={"messages": [USER], field: {"remote_host": "127.0.0.1"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert not service.requests


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
