"""`tidemill support-bundle`: everything that can be had, what could not by name, and never a secret."""

import json
import logging
import tarfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_engine import worker
from tests.support.cluster.fake_service import FakeService, app_over, call, saying, tokenizer, with_server
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.fleet import EXIT_NOT_ALL
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.context import Parts
from tidemill.cluster.edge.requests.security import Security, Tls
from tidemill.cluster.observability.logs import keeping
from tidemill.cluster.observability.redact import REMOVED, plain, without_secrets
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.processes import support_info as about
from tidemill.cluster.processes.endpoint.endpoint import Endpoint
from tidemill.cluster.processes.support_info import config_of, software, tails
from tidemill.cluster.settings import ClusterSettings, FleetSettings
from tidemill.kvstore.errors import TidemillError

T = TypeVar("T")

KEY = "a-key-that-looks-like-nothing-at-all"
PROMPT = "the lighthouse keeper hides a lantern"
ANSWER = " in the harbour"
SECRETS = {
    "sk-Zx81hQpm27": "Zx81hQpm27",  # a key of ours
    "authorization: Bearer eyJhbGciOi.JIUzI1NiIsInR5.cCI6": "eyJhbGciOi",
    "redis://user:hunter2hunter@host:6379/0": "hunter2hunter",
    "RAY_AUTH_TOKEN=0123deadbeef": "0123deadbeef",
    '"api_key": "quite-secret-1"': "quite-secret-1",
    "tidemill top --api-key plain-secret-2": "plain-secret-2",
    "ab" * 32: "ab" * 32,  # a token between processes
    "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBkey\nAwE\n-----END EC PRIVATE KEY-----": "MHcCAQEEIBkey",
}
"""The secrets in texts."""


def test_secrets_are_removed_and_the_rest_is_kept() -> None:
    text = without_secrets("\n".join(f"begin {line} end" for line in SECRETS))
    assert not [secret for secret in SECRETS.values() if secret in text]
    assert text.count(REMOVED) == len(SECRETS)
    assert text.count("begin ") == text.count(" end") == len(SECRETS)
    assert "host:6379/0" in text


@pytest.mark.parametrize(
    "line",
    [
        'tidemill:prompt_tokens_total{model_name="keeper"} 12345.0',
        '"prompt_tokens": 12345, "max_tokens": 4096, "page_tokens": 64',
        '{"store_secret_file": null, "num_keys": 12345}',
        "file:///dev/shm/tidemill-store-x1?size=8GiB",
        "worker-0f1e2d3c4b5a69788796a5b4c3d2e1f00112233445566778899aabbc-01000000-1234.err",
        "decode-0 took 12 tokens: 4096 are left, risk-free",
    ],
)
def test_other_words_are_kept(line: str) -> None:
    assert without_secrets(line) == line


@given(st.text(min_size=5), st.text(), st.text())
def test_known_secret_goes_wherever_it_is(secret: str, before: str, after: str) -> None:
    if secret not in REMOVED and REMOVED not in secret:
        found = without_secrets(f"{before}{secret}{after}", [secret])
        assert REMOVED in found
        assert secret not in found.replace(REMOVED, "\0")


def test_settings_are_shown_without_secrets() -> None:
    settings = ClusterSettings(fleets=(FleetSettings(workers=(worker("decode-0", "decode"),)),))
    endpoint = Endpoint(
        host="127.0.0.1",
        port=1,
        security=Security(
            keys=(
                ApiKey(tenant="a", sha256=digest_of(KEY), operator=True),
                ApiKey(tenant="b", sha256="0" * 64),
            ),
            tls=Tls(certificate=Path("/c.pem"), key=Path("/k.pem")),
        ),
        telemetry=Telemetry(traces_url="http://me:hunter2hunter@collector:4318/v1/traces"),
    )
    shown: Any = json.loads(json.dumps(config_of(endpoint, settings)))
    assert (shown["endpoint"]["keys"], shown["endpoint"]["keys_of_operators"]) == (2, 1)
    assert shown["endpoint"]["tls"]["key"] == "/k.pem"
    assert shown["endpoint"]["telemetry"]["traces_url"] == f"http://{REMOVED}collector:4318/v1/traces"
    assert shown["cluster"]["fleets"][0]["workers"][0]["name"] == "decode-0"
    assert "hunter2" not in str(shown)
    assert digest_of(KEY) not in str(shown)


@dataclass
class Odd:
    names: frozenset[str]
    ids: tuple[int, ...]
    why: object


def test_anything_is_plain() -> None:
    odd = Odd(frozenset({"b", "a"}), (1, 2), b"bytes")
    assert plain(odd) == {"names": ["a", "b"], "ids": [1, 2], "why": "b'bytes'"}


def test_software_has_the_packages_that_matter() -> None:
    shown: Any = json.loads(json.dumps(software()))
    assert {"ray", "torch", "httpx"} <= shown["packages"].keys()


def test_logs_are_shown_by_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "TAIL_BYTES", 64)
    files = {"a.err": "x" * 100 + "the end", "b.err": "sk-Zx81hQpm27", "c.err": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    shown = tails(tmp_path.iterdir())
    assert shown == {"a.err": "x" * 57 + "the end", "b.err": REMOVED}
    monkeypatch.setattr(about, "FILES_MAX", 1)
    assert len(tails(tmp_path.iterdir())) == 1


def test_process_keeps_its_last_lines() -> None:
    lines = deque[str](maxlen=2)
    with keeping(lines):
        for number in range(3):
            logging.getLogger("tidemill.test").warning("line %s", number)
    logging.getLogger("tidemill.test").warning("after it")
    assert [line.rsplit(": ")[-1] for line in lines] == ["line 1", "line 2"]


def fails() -> object:
    raise TidemillError("Ray does not tell its nodes: it is away")


PARTS: Parts = {
    "config": lambda: {"model": "keeper"},
    "software": software,
    "nodes": fails,
    "logs": lambda: {
        "frontend": "\n".join([f"asked with {KEY}", *SECRETS]),
        "../worker-1.err": "fine",
    },
}


def against(do: Callable[[str], T], parts: Parts = PARTS, *, has_keys: bool = True) -> T:
    """A server that has answered a request."""
    keys = [ApiKey(tenant="operator", sha256=digest_of(KEY), operator=True)] if has_keys else []
    app = app_over(FakeService(saying(ANSWER)), keys=keys, parts=parts)
    headers = {"authorization": f"Bearer {KEY}"}
    reply = call(app, "POST", "/v1/completions", json={"prompt": PROMPT, "user": "u"}, headers=headers)
    assert reply.json()["choices"][0]["text"] == ANSWER
    return with_server(app, do)


def bundle(url: str, path: Path, *arguments: str) -> int:
    options = cli.parser().parse_args(["support-bundle", "-o", str(path), "--url", url, *arguments])
    return options.run(options)


def files_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {getmember.name: archive.extractfile(getmember) for getmember in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_bundle_has_all_that_is_available_and_no_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bundle.tar.gz"
    path.write_text("an old one")
    assert against(lambda url: bundle(url, path, "--api-key", KEY)) == EXIT_NOT_ALL
    out, err = capsys.readouterr()
    assert "11 of 12 parts" in out
    assert "without nodes.json" in err
    files = files_of(path)
    of_server = ("version", "status", "memory", "scale", "requests", "config", "software")
    assert {name.removeprefix("tidemill-support/") for name in files} == {
        *(f"{name}.json" for name in ("index", "client", *of_server)),
        *("metrics.txt", "logs/frontend", "logs/worker-1.err"),
    }
    index = json.loads(files["tidemill-support/index.json"])
    assert "it is away" in index["parts"]["nodes.json"]
    assert index["parts"]["status.json"] == "ok"
    whole = "\n".join(files.values())
    for secret in (*SECRETS.values(), KEY, digest_of(KEY), PROMPT, ANSWER, "lighthouse", "harbour"):
        assert secret not in whole
    (request,) = json.loads(files["tidemill-support/requests.json"])["requests"]
    assert request["prompt_tokens"] == len(tokenizer().encode(PROMPT))
    assert path.stat().st_mode & 0o077 == 0


def test_index_names_a_missing_server_or_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bundle.tar.gz"
    assert bundle("http://127.0.0.1:9", path) == EXIT_NOT_ALL
    index = json.loads(files_of(path)["tidemill-support/index.json"])
    assert index["parts"].pop("client.json") == "ok"
    assert all("--url" in error for error in index["parts"].values())
    assert path.stat().st_mode & 0o077 == 0
    against(lambda url: bundle(url, path))
    index = json.loads(files_of(path)["tidemill-support/index.json"])
    assert "--api-key" in index["parts"]["status.json"]
    assert index["parts"]["metrics.txt"] == "ok", "it needs no key"
    assert capsys.readouterr().out.count("support-bundle") == 0


def test_it_is_whole_where_all_can_be_had(tmp_path: Path) -> None:
    parts: Parts = {**PARTS, "nodes": list}
    assert against(lambda url: bundle(url, tmp_path / "b.tar.gz"), parts, has_keys=False) == 0


def test_where_it_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no" / "bundle.tar.gz"
    assert cli.main(["support-bundle", "-o", str(path), "--url", "http://127.0.0.1:9"]) == cli.EXIT_REFUSED
    assert "--output" in capsys.readouterr().err


def test_odd_characters_in_a_part_can_be_read() -> None:
    parts: Parts = {"logs": lambda: {"frontend": "no \ud800"}}
    reply = call(app_over(FakeService(saying(" a")), parts=parts), "GET", "/cluster/support/logs")
    assert reply.json() == {"logs": {"frontend": "no \ud800"}}


def test_unknown_part_is_named() -> None:
    app = app_over(FakeService(saying(" a")), parts=PARTS)
    reply = call(app, "GET", "/cluster/support/everything")
    assert reply.status_code == 404
    assert "config, software, nodes, logs" in reply.json()["error"]["message"]
    assert call(app, "GET", "/cluster/support/nodes").status_code == 503


def test_server_info_is_that_of_sglang_with_settings_without_secrets() -> None:
    parts: Parts = {"config": lambda: {"endpoint": {"port": 8000}}}
    service = FakeService(saying("a"))
    keys = (ApiKey(tenant="shop", sha256=digest_of("sk-shop")),)
    for path in ("/server_info", "/get_server_info"):
        found = call(app_over(service, parts=parts), "GET", path).json()
        assert found["version"]
        assert (found["served_model_name"], found["context_length"]) == ("keeper", 512)
        assert found["settings"] == {"endpoint": {"port": 8000}}
        assert [state["worker"] for state in found["internal_states"]] == ["prefill-0", "decode-0"]
        assert found["internal_states"][0]["avg_spec_accept_length"] == 1 + 3 / 4
        assert found["internal_states"][0]["memory_usage"]["budget"] == 4 << 20
        headers = {"authorization": "Bearer sk-shop"}
        guarded = app_over(service, parts=parts, keys=keys)
        assert call(guarded, "GET", path, headers=headers).status_code == 403
