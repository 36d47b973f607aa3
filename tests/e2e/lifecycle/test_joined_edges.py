"""Edges that join a cluster of real processes, by certificates or by a token that may be revoked: any of them
may die, and they outlive their routers."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
import trustme
import yaml

from tests.support.e2e.faults import ROUTER, SUPERVISOR, process_of
from tests.support.e2e.server import (
    EVENTUALLY_S_MAX,
    NO_TLS,
    EdgeProcess,
    Server,
    command_of,
    eventually,
    run_cli,
)
from tests.support.e2e.streams import Body, Stream, client_of, completion, random_prompt
from tests.support.sockets import free_port
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.edge.requests.api_keys import digest_of

pytestmark = pytest.mark.slow

KEY = "sk-the-key-of-an-operator"
OTHER = "sk-the-key-of-another"
PAGE_TOKENS = 16


@dataclass
class Joined:
    """A cluster with two routers, and an edge that was started before it."""

    server: Server
    edge: EdgeProcess
    url: str  # of the edge
    keys_file: Path
    arguments: list[str]  # of further edges

    def routers(self) -> list[int]:
        return [process.pid for process in self.server.processes() if "RouterActor" in command_of(process)]

    def command(self, *arguments: str) -> tuple[int, str, str]:
        ended, _ = run_cli(*arguments, "--url", self.server.url, "--api-key", KEY)
        return ended.returncode, ended.stdout, ended.stderr

    def token(self, *arguments: str) -> list[str]:
        """The arguments of an edge with a new token."""
        status, out, err = self.command("join-token", *arguments)
        assert status == 0, err
        return out.split()[2:]


def write_keys(path: Path, *keys: str) -> None:
    entries = [{"tenant": f"tenant-{key[-4:]}", "sha256": digest_of(key), "operator": True} for key in keys]
    path.write_text(yaml.safe_dump({"keys": entries}))


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    folder = tmp_path_factory.mktemp("joined")
    authority = trustme.CA()
    tls, key = issue(folder / "tls", authority), folder / "ca.key"
    authority.private_key_pem.write_to_path(str(key))
    certificates = ["--cluster-ssl-certfile", str(tls.certificate), "--cluster-ssl-keyfile", str(tls.key)]
    certificates += ["--cluster-ssl-ca-certs", str(tls.ca)]
    port = free_port()
    arguments = ["--join", f"127.0.0.1:{port}", *certificates]
    keys_file = folder / "keys.yaml"
    write_keys(keys_file, KEY)
    sized = ["--prefill", "1", "--decode", "1", "--memory", "64MiB", "--page-size", str(PAGE_TOKENS)]
    reached = ["--routers", "2", "--router-port", str(port), "--api-keys-file", str(keys_file)]
    reached += ["--cluster-ssl-ca-keyfile", str(key)]
    with EdgeProcess(folder / "edge", *arguments) as edge:
        eventually(lambda: "waiting for the cluster" in edge.log())
        with Server(["keeper", "--port", "0", *sized, *reached, *certificates], folder / "log") as server:
            yield Joined(server, edge, edge.wait_until_ready(), keys_file, arguments)
            maps = [mapped.path for mapped in psutil.Process(edge.pid).memory_maps()]
            assert not [path for path in maps if "libtorch" in path or "_raylet" in path]
            assert edge.stop() == 0, edge.log()


def bodies(count: int, seed: int) -> list[Body]:
    rng = Random(seed)
    return [completion(random_prompt(rng, 200), 900) for _ in range(count)]


def client(url: str) -> httpx.AsyncClient:
    opened = client_of(url)
    opened.headers["authorization"] = f"Bearer {KEY}"
    return opened


async def run_all(url: str, streams: list[Stream]) -> list[Stream]:
    async with client(url) as opened:
        await asyncio.gather(*(stream.run(opened) for stream in streams))
    return streams


def status_of(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/v1/models", headers=headers, timeout=EVENTUALLY_S_MAX, verify=NO_TLS).status_code


def test_killed_edge_ends_its_own_streams_only(joined: Joined, tmp_path: Path) -> None:
    lost = [Stream(body) for body in bodies(3, seed=1)]
    kept = [Stream(body) for body in bodies(3, seed=2)]

    async def run(other: EdgeProcess) -> None:
        async with client(other.wait_until_ready()) as dying, client(joined.url) as living:
            ended = [asyncio.create_task(stream.run(dying)) for stream in lost]
            others = [asyncio.create_task(stream.run(living)) for stream in kept]
            for stream in (*lost, *kept):
                await stream.under_way.wait()
            other.kill()
            errors = await asyncio.gather(*ended, return_exceptions=True)
            assert all(isinstance(error, httpx.TransportError) for error in errors), errors
            assert not all(stream.finish_reason for stream in kept), "too late: make the streams longer"
            await asyncio.gather(*others)

    with EdgeProcess(tmp_path / "edge", *joined.arguments) as other:
        asyncio.run(run(other))
    again = asyncio.run(run_all(joined.url, [Stream(stream.body) for stream in lost]))
    for stream, first in zip(again, lost, strict=True):
        assert stream.text.startswith(first.text)
        assert stream.usage["prompt_tokens_details"]["cached_tokens"] >= 200 // PAGE_TOKENS * PAGE_TOKENS
    for streams in (again, kept):
        calm = asyncio.run(run_all(joined.server.url, [Stream(stream.body) for stream in streams]))
        assert [stream.outcome for stream in streams] == [stream.outcome for stream in calm]


def test_edge_outlives_its_routers_and_follows_keys(joined: Joined) -> None:
    streams = [Stream(body) for body in bodies(3, seed=3)]

    async def run() -> None:
        async with client(joined.url) as opened:
            running = [asyncio.create_task(stream.run(opened)) for stream in streams]
            for stream in streams:
                await stream.under_way.wait()
            for router in joined.routers():
                os.kill(router, signal.SIGKILL)
            assert await asyncio.to_thread(status_of, joined.url, KEY) == 200, "it serves what it knows"
            assert await asyncio.to_thread(status_of, joined.url, OTHER) == 401
            await asyncio.gather(*running)

    before = joined.routers()
    assert len(before) == 2
    asyncio.run(run())
    asyncio.run(run_all(joined.url, [Stream(body) for body in bodies(2, seed=4)]))
    eventually(lambda: len(joined.routers()) == 2)
    assert set(before).isdisjoint(joined.routers())
    calm = asyncio.run(run_all(joined.server.url, [Stream(stream.body) for stream in streams]))
    assert [stream.outcome for stream in streams] == [stream.outcome for stream in calm]
    write_keys(joined.keys_file, KEY, OTHER)
    eventually(lambda: status_of(joined.url, OTHER) == 200)
    write_keys(joined.keys_file, KEY)
    eventually(lambda: status_of(joined.url, OTHER) == 401)
    assert status_of(joined.url, KEY) == 200


def test_orders_work_at_any_edge(joined: Joined) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    stream = bodies(1, seed=5)
    asyncio.run(run_all(joined.url, list(map(Stream, stream))))
    [cached] = asyncio.run(run_all(joined.url, list(map(Stream, stream))))
    assert cached.usage["prompt_tokens_details"]["cached_tokens"]
    for asked, other in ((joined.url, joined.server.url), (joined.server.url, joined.url)):
        answer = httpx.post(f"{asked}/reset_prefix_cache", headers=headers, verify=NO_TLS, timeout=60)
        assert answer.is_success, answer.text
        [fresh] = asyncio.run(run_all(other, list(map(Stream, stream))))
        assert not fresh.usage["prompt_tokens_details"]["cached_tokens"], "every edge knows of the reset"
        assert fresh.outcome == cached.outcome
    with httpx.Client(headers=headers, verify=NO_TLS, timeout=60) as opened:
        answer = opened.post(f"{joined.url}/cluster/scale", json={"workers": {"decode": 0}})
        assert answer.status_code == 400, answer.text
        assert "has to stay" in answer.json()["error"]["message"]
        answer = opened.post(f"{joined.url}/cluster/scale", json={"workers": {"decode": 1}})
        assert answer.is_success, answer.text
        for url in (joined.url, joined.server.url):
            roles = opened.get(f"{url}/cluster/scale").json()["roles"]
            assert [(role["role"], role["workers"]) for role in roles] == [("prefill", 1), ("decode", 1)]


def test_limits_of_a_key_hold_over_two_edges_and_a_killed_edge_keeps_nothing(
    joined: Joined, tmp_path: Path
) -> None:
    entries = [
        {"tenant": "people", "sha256": digest_of(KEY), "operator": True},
        {"tenant": "shop", "sha256": digest_of(OTHER), "max_parallel_requests": 2, "tokens_per_minute": 2500},
    ]
    joined.keys_file.write_text(yaml.safe_dump({"keys": entries}))
    held = [Stream(body) for body in bodies(2, seed=6)]

    def ask(url: str, **changed: int) -> httpx.Response:
        body = {**bodies(1, seed=7)[0], **changed}
        headers = {"authorization": f"Bearer {OTHER}"}
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300, verify=NO_TLS)

    async def run(other: EdgeProcess) -> None:
        url = other.wait_until_ready()
        await asyncio.to_thread(eventually, lambda: status_of(joined.url, OTHER) == 200)
        async with client(url) as dying:
            dying.headers["authorization"] = f"Bearer {OTHER}"
            running = [asyncio.create_task(stream.run(dying)) for stream in held]
            for stream in held:
                await stream.under_way.wait()
            for refusing in (joined.url, joined.server.url, url):
                refused = await asyncio.to_thread(ask, refusing)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), refused.text
                assert "2 requests open" in refused.json()["error"]["message"]
            assert not any(stream.finish_reason for stream in held), "too late: make the streams longer"
            other.kill()
            await asyncio.gather(*running, return_exceptions=True)

    with EdgeProcess(tmp_path / "edge", *joined.arguments) as other:
        asyncio.run(run(other))
    eventually(lambda: ask(joined.url, max_tokens=1).status_code == 200)
    used = 0
    for _ in range(20):
        answer = ask(joined.server.url)
        if answer.status_code == 429:
            break
        assert answer.is_success, answer.text
        used += answer.json()["usage"]["total_tokens"]
    refused = ask(joined.url)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-limit-tokens"] == "2500"
    assert float(refused.headers["x-ratelimit-reset-tokens"].removesuffix("s")) > 0
    assert used >= 1000, "it had them, but for those of the streams"
    write_keys(joined.keys_file, KEY)
    eventually(lambda: status_of(joined.url, OTHER) == 401)


def test_edge_without_a_certificate_is_refused(joined: Joined, tmp_path: Path) -> None:
    with EdgeProcess(tmp_path / "edge", *joined.arguments[:2]) as edge:
        assert edge.wait() == 2
    assert "refuses this edge" in edge.log()
    assert "--cluster-ssl-certfile" in edge.log()


def refused(folder: Path, *arguments: str) -> str:
    """The last line of an edge that may not join; others say that it waits for a router."""
    with EdgeProcess(folder, *arguments) as edge:
        assert edge.wait() == 2
    *_, line = edge.log().splitlines()
    return line


def test_edge_joins_by_a_token_and_is_revoked_amid_a_stream(joined: Joined, tmp_path: Path) -> None:
    arguments = joined.token("web-1")
    with EdgeProcess(tmp_path / "web-1", *arguments) as edge:
        url = edge.wait_until_ready()
        asked = bodies(2, seed=8)
        found = [asyncio.run(run_all(at, list(map(Stream, asked)))) for at in (url, joined.server.url)]
        assert [stream.outcome for stream in found[0]] == [stream.outcome for stream in found[1]]
        order = {"name": "web-2", "life_s": 60.0}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{url}/cluster/edges", json=order, headers=headers, timeout=60)
        assert answer.status_code == 403, "it makes no tokens"
        assert "was used by another edge" in refused(tmp_path / "second", *arguments)

        process_of(joined.server, SUPERVISOR).kill()  # the next one reads the journal
        lost = Stream({**bodies(1, seed=9)[0], "max_tokens": 6000})
        kept = Stream({**bodies(1, seed=10)[0], "max_tokens": 3000})

        async def run() -> None:
            async with client(url) as dying, client(joined.server.url) as living:
                ended = asyncio.create_task(lost.run(dying))
                other = asyncio.create_task(kept.run(living))
                for stream in (lost, kept):
                    await stream.under_way.wait()
                status, out, err = await asyncio.to_thread(joined.command, "revoke", "web-1", "--json")
                assert status == 0, err
                assert [row["state"] for row in json.loads(out)["edges"]] == ["revoked"]
                await asyncio.gather(ended, return_exceptions=True)
                assert lost.finish_reason != "length", "too late: make the stream longer"
                await other

        asyncio.run(run())
        assert kept.finish_reason == "length"
        assert edge.wait() == 2
        assert "was revoked" in edge.log().splitlines()[-1]
        as_far = {**lost.body, "max_tokens": len(lost.pieces)}
        [again] = asyncio.run(run_all(joined.server.url, [Stream(as_far)]))
        assert lost.text.startswith(again.text)
    process_of(joined.server, ROUTER).kill()
    assert "was revoked" in refused(tmp_path / "again", *arguments)
    status, out, _ = joined.command("revoke")
    assert status == 0
    assert "web-1" in out


def test_tokens_that_admit_no_edge(joined: Joined, tmp_path: Path) -> None:
    join, address, option, token = joined.token("late", "--expires-in", "0.5")
    public, secret, fingerprint = token.split(".")
    eventually(lambda: "expired" in joined.command("revoke")[1])
    revoked = joined.token("gone")
    assert joined.command("revoke", "gone")[0] == 0
    for number, (given, line) in enumerate(
        (
            (token, "has expired"),
            (f"{public}.{secret[::-1]}.{fingerprint}", "not one of this cluster"),
            (f"{public}.{secret}.{'0' * 64}", "nothing was sent"),
            ("sk-key", "is no token"),
            (revoked[-1], "was revoked"),
        )
    ):
        assert line in refused(tmp_path / str(number), join, address, option, given)
    status, _, err = joined.command("revoke", "web-9")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "neither an edge" in err
