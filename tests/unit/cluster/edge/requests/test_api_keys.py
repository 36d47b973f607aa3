"""API keys at the edge: who may ask what, how often, and whose prefixes are whose."""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tidemill.cluster.edge.http.middleware import OPEN_PATHS
from tidemill.cluster.edge.requests import api_keys
from tidemill.cluster.edge.requests.api_keys import (
    FILE_BYTES_MAX,
    ApiKey,
    ApiKeys,
    KeysFile,
    KeysWatch,
    digest_of,
    read_keys,
)
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Overloaded, RequestError

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello!"}]}
KEYS = (
    ApiKey(tenant="search", sha256=digest_of("sk-one")),
    ApiKey(tenant="search", sha256=digest_of("sk-two")),
    ApiKey(tenant="shop", sha256=digest_of("sk-shop"), requests_per_minute=2),
    ApiKey(tenant="batch", sha256=digest_of("sk-batch"), tokens_per_minute=1, max_parallel_requests=1),
    ApiKey(tenant="people", sha256=digest_of("sk-people"), operator=True),
)


def edge(service: FakeService) -> FastAPI:
    return app_over(service, keys=KEYS)


def ask(app: FastAPI, path: str, key: str | None, body: object = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    return call(app, method, path, headers=headers, **({} if body is None else {"json": body}))


@pytest.mark.parametrize("key", [None, "", "sk-on", "sk-one2", digest_of("sk-one"), "\u00e9"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/cluster", "/tokenize", "/openapi.json", "/nowhere"])
def test_no_client_enters_without_a_known_key(path: str, key: str | None) -> None:
    async def unread() -> AsyncGenerator[bytes]:
        raise AssertionError("the body of a stranger is read")
        yield b""

    service = FakeService(saying("a"))
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    body = {"content": unread()} if path == CHAT else {}
    reply = call(edge(service), "POST" if path == CHAT else "GET", path, headers=headers, **body)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert not service.requests


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_bring_no_key(path: str) -> None:
    assert ask(edge(FakeService(saying("a"))), path, None).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/cluster", None, 200),
        ("/cluster/memory", None, 200),
        ("/cluster/requests", None, 200),
        ("/cluster/workers/decode-0/drain", {}, 200),
        ("/cluster/scale", None, 200),
        ("/cluster/scale", {"workers": {"decode": 2}}, 200),
        ("/cluster/support/config", None, 404),  # it reveals nothing
        ("/reset_prefix_cache", {}, 200),
        ("/flush_cache", {}, 200),
    ],
)
def test_orders_are_for_operators(path: str, body: dict[str, object] | None, status: int) -> None:
    app = edge(FakeService(saying("a")))
    assert ask(app, path, "sk-one", body).status_code == 403
    assert ask(app, path, "sk-people", body).status_code == status


def test_tenant_shares_prefixes_with_itself_alone() -> None:
    service = FakeService(saying("a"))
    app = edge(service)
    asking = [("sk-one", None), ("sk-two", None), ("sk-shop", None), ("sk-one", "a"), ("sk-shop", "a")]
    for key, salt in asking:
        assert ask(app, CHAT, key, {**BODY, "cache_salt": salt}).status_code == 200
    one, two, shop, salted, shop_salted = (request.salt for request in service.requests)
    assert one == two
    assert len({one, shop, salted, shop_salted, ""}) == 5
    names = ("search", "search", "shop", "search", "shop")
    assert [request.tenant for request in service.requests] == [f"tenant:{name}" for name in names]
    plain = app_over(service)
    naming_itself = {**BODY, "cache_salt": "tenant:search/"}
    assert call(plain, "POST", CHAT, json=naming_itself).status_code == 400


def test_keys_appear_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(saying("a"))
    caplog.set_level("DEBUG", "tidemill")
    reply = ask(edge(service), CHAT, "sk-secret-of-somebody")
    ask(edge(service), CHAT, "sk-shop", BODY)
    assert "sk-" not in reply.text + caplog.text + repr(service.requests)


async def test_client_over_its_rate_waits() -> None:
    now_s = 100.0
    keys = ApiKeys(KEYS, lambda: now_s)
    headers = {"authorization": "Bearer sk-shop"}
    for pause_s, admitted in ((0, 2), (29.9, 0), (0.1, 1), (1000, 2)):
        now_s += pause_s
        for _ in range(admitted):
            await keys.admit(CHAT, headers)
        with pytest.raises(Overloaded, match="shop asks more than 2 times a minute") as refused:
            await keys.admit(CHAT, headers)
        assert refused.value.retry_after_s == pytest.approx(0.1 if pause_s == 29.9 else 30)
    await keys.admit(CHAT, {"authorization": "Bearer sk-one"})


def test_too_often_is_a_429_with_a_time() -> None:
    app = edge(FakeService(saying("a")))
    replies = [ask(app, CHAT, "sk-shop", BODY) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    headers = replies[2].headers
    assert int(headers["retry-after"]) > 0
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompts_and_answers_are_paid_before_the_next_answer(path: str, *, stream: bool) -> None:
    """One that is refused is not asked of the service."""
    service = FakeService(saying("a"))
    app = edge(service)
    body = {CHAT: BODY, "/v1/completions": {"prompt": "Hello!"}, "/v1/responses": {"input": "Hello!"}}[path]
    replies = [ask(app, path, "sk-batch", {**body, "stream": stream}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 429]
    assert replies[1].headers["x-ratelimit-limit-tokens"] == "1"
    (request,) = service.requests
    seconds = 60 * (len(request.tokens) + 1)
    assert int(replies[1].headers["retry-after"]) >= seconds, "the prompt and the answer"


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- tenant: shop\n  sha256: {digest_of('a')}\n  requests_per_minute: 5\n")
    assert read_keys(file) == [ApiKey(tenant="shop", sha256=digest_of("a"), requests_per_minute=5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys.yaml: send|keys.yaml: Input"),
        ("keys: []", "keys"),
        ("keys:\n- tenant: a b\n  sha256: x", r"keys\[0\].tenant"),
        ("keys:\n- tenant: a\n  sha256: plain-text-key", r"keys\[0\].sha256"),
        ("keys:\n- tenant: a\n  key: sk-plain", r"keys\[0\]"),
        ("keys: [", "is no YAML"),
        ("keys: 2026-99-99", "is no YAML"),
        (f"keys: {'9' * 5000}", "is no YAML"),
        ("[" * 2000, "is no YAML"),
        ("keys: !!python/name:os.system", "is no YAML"),
        ("\0", "is no YAML"),
        ("#" * (FILE_BYTES_MAX + 1), "cannot be read .more than"),
    ],
)
def test_broken_file_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(TidemillError, match=message):
        read_keys(file)
    with pytest.raises(TidemillError, match="cannot be read"):
        read_keys(tmp_path / "missing.yaml")


def write_keys(path: Path, *names: str) -> None:
    """Replace the file in one step, as `mv` and Kubernetes do."""
    entries = (f"- {{tenant: {name}, sha256: {digest_of(name)}, requests_per_minute: 1}}" for name in names)
    new = path.with_suffix(".new")
    new.write_text("\n".join(["keys:", *entries]))
    new.rename(path)


def test_changed_file_takes_effect_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, "old", "both")
    file = KeysFile(path=path, others=(ApiKey(tenant="operator", sha256=digest_of("fixed")),))
    keys = ApiKeys(file.read())
    watch = KeysWatch(keys, file)

    def valid() -> set[str]:
        found: set[str] = set()
        asyncio.run(watch.look())
        for name in ("old", "both", "new", "fixed"):
            try:
                keys.tenant({"authorization": f"Bearer {name}"})
                found.add(name)
            except RequestError:
                pass
        return found

    assert valid() == {"old", "both", "fixed"}
    asyncio.run(keys.admit(CHAT, {"authorization": "Bearer both"}))
    write_keys(path, "both", "new")
    assert valid() == {"both", "new", "fixed"}
    with pytest.raises(Overloaded):
        asyncio.run(keys.admit(CHAT, {"authorization": "Bearer both"}))
    for broken in ("keys: []", "keys: [", "keys: 2026-99-99", None, "pipe"):
        path.unlink(missing_ok=True)
        if broken == "pipe":
            os.mkfifo(path)
        elif broken is not None:
            path.write_text(broken)
        caplog.clear()
        assert valid() == valid() == {"both", "new", "fixed"}
        assert len([record for record in caplog.records if "stay valid" in record.message]) == 1
    write_keys(path, "old")
    assert valid() == {"old", "fixed"}


def test_file_that_the_system_did_not_read_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was taken out while no descriptor was free would stay valid otherwise."""
    path = tmp_path / "keys.yaml"
    write_keys(path, "old")
    file = KeysFile(path=path)
    keys = ApiKeys(file.read())
    watch = KeysWatch(keys, file)
    write_keys(path, "new")
    with monkeypatch.context() as patched:
        patched.setattr(api_keys, "read_regular", Mock(side_effect=OSError(errno.EMFILE, "no descriptor")))
        asyncio.run(watch.look())
    assert [key.tenant for key in keys.known] == ["old"]
    asyncio.run(watch.look())
    assert [key.tenant for key in keys.known] == ["new"]


def test_first_look_finds_what_has_changed_since_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, "old")
    file = KeysFile(path=path)
    keys = ApiKeys(file.read())
    write_keys(path, "new")
    asyncio.run(KeysWatch(keys, file).look())
    assert keys.tenant({"authorization": "Bearer new"}) == "new"
