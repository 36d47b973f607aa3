"""HTTP as clients use it: upgrades that they offer, HEAD, packed bodies, paths with and without /v1."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import (
    KEEPER,
    FakeService,
    app_over,
    call,
    chat,
    events_of,
    saying,
    serving,
)
from tests.support.sockets import connected
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.json_body import PARTS_MAX, unpacked
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX, EdgeLimits
from tidemill.cluster.settings import ChatSettings
from tidemill.workers.messages import RequestError

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BODY = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
APP = app_over(FakeService(saying(" a b")))


def in_parts(data: bytes) -> bytes:
    return gzip.compress(data[:9]) + gzip.compress(b"") + gzip.compress(data[9:])


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("gzip", in_parts),
        ("deflate", zlib.compress),
        ("deflate", bare),
        ("identity", bytes),
    ],
)
def test_packed_body_is_that_of_the_request(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    found = call(APP, "POST", TEXTS, content=pack(BODY), headers=headers)
    assert found.status_code == 200, found.text
    damaged = call(APP, "POST", TEXTS, content=pack(BODY)[:-9], headers=headers)
    assert damaged.status_code == 400


@pytest.mark.parametrize(("over", "status"), [(0, 400), (1, 413)])
def test_packed_body_has_the_limit_of_a_plain_one(over: int, status: int) -> None:
    """A bomb is unpacked up to the limit."""
    packed = gzip.compress(b" " * (BODY_BYTES_MAX + over))
    found = call(APP, "POST", TEXTS, content=packed, headers={"content-encoding": "gzip"})
    assert found.status_code == status
    bomb = gzip.compress(bytes(64 << 20))
    for parts in (1, 3, PARTS_MAX + 1):
        assert len(unpacked(gzip.compress(b"a" * 99) + bomb * parts, "gzip")) == BODY_BYTES_MAX + 1


def test_parts_of_a_packed_body_are_bounded_and_padding_is_none() -> None:
    part = gzip.compress(b"a")
    assert unpacked(part * PARTS_MAX + bytes(512), "gzip") == b"a" * PARTS_MAX
    with pytest.raises(RequestError, match=f"more than {PARTS_MAX} parts: pack it whole"):
        unpacked(part * (PARTS_MAX + 1), "gzip")
    for behind in (b"x", part[:-1], part[:4]):
        with pytest.raises(RequestError, match="damaged or cut short"):
            unpacked(part + behind, "gzip")


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "\u00e9"])
def test_unknown_encoding_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(RequestError, match="send gzip, x-gzip, deflate or none") as refused:
        unpacked(b"", encoding)
    assert refused.value.status == 415


UPGRADES = [
    {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"},
    {"Connection": "keep-alive, upgrade", "Upgrade": "TLS/1.2"},
    {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "a"},
]


def head_of(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{name}: {value}" for name, value in {"host": "localhost", **headers}.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("form", ["chunked", "whole"])
@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_offer_of_another_protocol_is_ignored_and_the_body_is_read(
    upgrade: dict[str, str], form: str, cut: int
) -> None:
    """Two such requests and two plain ones on one connection, in pieces of `cut` bytes."""
    body = BODY if form == "whole" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    length = {"Content-Length": str(len(BODY))} if form == "whole" else {"Transfer-Encoding": "chunked"}
    post = head_of("POST", TEXTS, **{"content-type": "application/json"}, **length, **upgrade) + body
    sent = post + head_of("GET", "/ping", **upgrade) + post + head_of("GET", "/ping", connection="close")

    async def exchange() -> bytes:
        app = app_over(FakeService(saying(" a b")))
        async with asyncio.timeout(60), serving(app) as url, connected(url) as (reader, writer):
            for start in range(0, len(sent), cut):
                writer.write(sent[start : start + cut])
                await asyncio.sleep(0)
            return await reader.read()

    received = asyncio.run(exchange())
    assert received.count(b"HTTP/1.1 200 OK") == 4, received
    assert received.count(b'"text":" a b"') == 2, received


def test_head_has_the_headers_of_get_wherever_that_is() -> None:
    paths = ["/", "/health", "/ping", "/v1/models", "/v1/models/keeper", "/cluster", "/version", "/metrics"]

    async def ask() -> list[tuple[httpx.Response, httpx.Response]]:
        async with serving(APP) as url, httpx.AsyncClient(base_url=url) as client:
            return [(await client.head(path), await client.get(path)) for path in paths]

    for head, get in asyncio.run(ask()):
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert call(APP, "HEAD", TEXTS).status_code == 405


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/models/"])
def test_models_are_listed_at_every_path_that_clients_use(path: str) -> None:
    assert call(APP, "GET", path).json() == call(APP, "GET", "/v1/models").json()
    assert call(APP, "GET", "/models/keeper").json() == call(APP, "GET", "/v1/models/keeper").json()


@pytest.mark.parametrize(
    ("path", "asked"), [(TEXTS, {"prompt": "a"}), (CHATS, {"messages": [{"role": "user", "content": "a"}]})]
)
@pytest.mark.parametrize("continuous", [0, 1])
def test_every_chunk_has_usage_if_it_is_asked_for(
    path: str, asked: dict[str, object], continuous: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": bool(continuous)}
    found = call(APP, "POST", path, json={**asked, "stream": True, "stream_options": options})
    *chunks, last, _ = events_of(found)
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    grown = counts[path == CHATS :]  # behind the opening
    assert grown == ([1 + index for index in range(len(grown))] if continuous else [None] * len(grown))
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    "more", [{"prompt": "a", "max_tokens": 10**7}, {"prompt": [5] * 99_999}, {"prompt": "a" * 999_999}]
)
def test_overflow_has_the_words_by_which_clients_know_it(more: dict[str, object]) -> None:
    error = call(APP, "POST", TEXTS, json=more).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]


def test_settings_of_the_tokenizer_are_those_of_its_folder() -> None:
    found = call(APP, "GET", "/tokenizer_info").json()
    config = json.loads((KEEPER / "tokenizer_config.json").read_text())
    assert found == {**found, **config}
    assert found["chat_template"] == (KEEPER / "chat_template.jinja").read_text()
    assert call(APP, "GET", "/tokenizer_info?model=other").status_code == 404


EVIL, GOOD = "http://evil.example", "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
KEY = ApiKey(tenant="a", sha256=digest_of("sk-a"))


def page_app(keys: Sequence[ApiKey] = (), **cors: Any) -> FastAPI:  # noqa: ANN401 - fields of EdgeLimits
    return app_over(FakeService(saying(" a")), limits=EdgeLimits(**cors), keys=keys)


@pytest.mark.parametrize("keys", [(), (KEY,)])
@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [((GOOD,), GOOD, True), (("*",), EVIL, True), ((GOOD,), EVIL, False), ((), GOOD, False)],
)
def test_pages_of_allowed_sites_may_call(
    keys: tuple[ApiKey, ...],
    origins: tuple[str, ...],
    origin: str,
    is_allowed: bool,  # noqa: FBT001 - a parameter
) -> None:
    """The preflight needs no key, the request itself does."""
    app = page_app(keys, allowed_origins=origins)
    preflight = call(app, "OPTIONS", TEXTS, headers={"origin": origin, **PREFLIGHT})
    assert (preflight.status_code == 200) == is_allowed
    assert ("access-control-allow-origin" in preflight.headers) == is_allowed
    headers = {"origin": origin, "content-type": "application/json"}
    key = {"authorization": "Bearer sk-a"} if keys else {}
    found = call(app, "POST", TEXTS, content=BODY, headers=headers | key)
    assert found.status_code == (200 if is_allowed or keys else 403)
    assert found.headers.get("access-control-allow-origin") in ({origin, "*"} if is_allowed else {None})
    if keys:
        assert call(app, "POST", TEXTS, content=BODY, headers=headers).status_code == 401


def test_methods_headers_and_credentials_are_those_that_are_set() -> None:
    app = page_app(
        allowed_origins=(GOOD,), allowed_methods=("POST",), allowed_headers=("x-a",), allow_credentials=True
    )
    asked = {"origin": GOOD, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    found = call(app, "OPTIONS", TEXTS, headers=asked)
    assert (found.status_code, found.headers["access-control-allow-credentials"]) == (200, "true")
    for other in ({"access-control-request-method": "PUT"}, {"access-control-request-headers": "x-b"}):
        assert call(app, "OPTIONS", TEXTS, headers=asked | other).status_code == 400


def test_tools_that_the_model_cannot_know_of_are_left_out_unless_they_are_forced() -> None:
    chats = ChatSettings(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    service = FakeService(saying(" a"))
    app = app_over(service, tokens=load_tokenizer(KEEPER, chats))
    tool = {"type": "function", "function": {"name": "look"}}
    found = chat(app, tools=[tool])
    assert (found.status_code, found.headers["x-tidemill-ignored"]) == (200, "tools")
    plain = chat(app)
    assert "x-tidemill-ignored" not in plain.headers
    assert plain.json()["usage"] == found.json()["usage"]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        refused = chat(app, tools=[tool], tool_choice=choice)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
