"""An edge joins a cluster of real processes by a token and answers; then it is revoked, amid a stream."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from tests.e2e.lifecycle.test_joined_edges import bodies
from tests.support.e2e.faults import ROUTER, SUPERVISOR, process_of
from tests.support.e2e.server import EdgeProcess, Server, eventually, run_cli
from tests.support.e2e.streams import Stream, client_of, outcomes_of
from tests.unit.cluster.rpc.test_mutual_tls import issue

pytestmark = pytest.mark.slow


@dataclass
class Cluster:
    server: Server
    folder: Path

    def command(self, *arguments: str) -> tuple[int, str, str]:
        ended, _ = run_cli(*arguments, "--url", self.server.url)
        return ended.returncode, ended.stdout, ended.stderr

    def token(self, *arguments: str) -> list[str]:
        """The arguments of an edge with a new token."""
        status, out, err = self.command("join-token", *arguments)
        assert status == 0, err
        return out.split()[2:]

    def edge(self, name: str, *arguments: str) -> EdgeProcess:
        return EdgeProcess(self.folder / name, *arguments)

    def refused(self, name: str, *arguments: str) -> str:
        """The last line of an edge that may not join; others say that it waits for a router."""
        with self.edge(name, *arguments) as edge:
            assert edge.wait()[0] == 2
        *_, line = edge.log().splitlines()
        return line


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tokens")
    authority = trustme.CA()
    tls = issue(folder / "tls", authority)
    key = folder / "ca.key"
    authority.private_key_pem.write_to_path(str(key))
    certificates = ["--cluster-ssl-certfile", str(tls.certificate), "--cluster-ssl-keyfile", str(tls.key)]
    certificates += ["--cluster-ssl-ca-certs", str(tls.ca), "--cluster-ssl-ca-keyfile", str(key)]
    sized = ["--prefill", "1", "--decode", "1", "--memory", "64MiB", "--page-size", "16", "--routers", "2"]
    with Server(["keeper", "--port", "0", *sized, *certificates], folder / "log") as server:
        yield Cluster(server, folder)


def test_edge_joins_by_a_token_and_is_revoked_amid_a_stream(cluster: Cluster) -> None:
    arguments = cluster.token("web-1")
    with cluster.edge("web-1", *arguments) as edge:
        url = edge.wait_until_ready()
        assert outcomes_of(url, bodies(2, seed=1)) == outcomes_of(cluster.server.url, bodies(2, seed=1))
        answer = httpx.post(f"{url}/cluster/edges", json={"name": "web-2", "life_s": 60.0}, timeout=60)
        assert answer.status_code == 403, "it makes no tokens"
        assert "was used by another edge" in cluster.refused("second", *arguments)

        process_of(cluster.server, SUPERVISOR).kill()  # the next one reads the journal
        lost = Stream({**bodies(1, seed=2)[0], "max_tokens": 6000})
        kept = Stream({**bodies(1, seed=3)[0], "max_tokens": 6000})

        async def run() -> None:
            async with client_of(url) as dying, client_of(cluster.server.url) as living:
                ended = asyncio.create_task(lost.run(dying))
                other = asyncio.create_task(kept.run(living))
                for stream in (lost, kept):
                    await stream.under_way.wait()
                status, out, err = await asyncio.to_thread(cluster.command, "revoke", "web-1", "--json")
                assert status == 0, err
                assert [row["state"] for row in json.loads(out)["edges"]] == ["revoked"]
                await asyncio.gather(ended, return_exceptions=True)
                assert lost.finish_reason != "length", "too late: make the stream longer"
                await other

        asyncio.run(run())
        assert kept.finish_reason == "length"
        assert edge.wait()[0] == 2
        assert "was revoked" in edge.log().splitlines()[-1]
        [(text, *_)] = outcomes_of(cluster.server.url, [lost.body])
        assert text.startswith(lost.text)
    process_of(cluster.server, ROUTER).kill()
    assert "was revoked" in cluster.refused("again", *arguments)
    status, out, _ = cluster.command("revoke")
    assert status == 0
    assert "web-1" in out


def test_tokens_that_admit_no_edge(cluster: Cluster) -> None:
    join, address, option, token = cluster.token("late", "--expires-in", "0.5")
    public, secret, fingerprint = token.split(".")
    eventually(lambda: "expired" in cluster.command("revoke")[1])
    assert "has expired" in cluster.refused("late", join, address, option, token)
    forged = f"{public}.{secret[::-1]}.{fingerprint}"
    assert "not one of this cluster" in cluster.refused("forged", join, address, option, forged)
    elsewhere = f"{public}.{secret}.{'0' * 64}"
    assert "nothing was sent" in cluster.refused("elsewhere", join, address, option, elsewhere)
    assert "is no token" in cluster.refused("text", join, address, option, "sk-key")
    revoked = cluster.token("gone")
    assert cluster.command("revoke", "gone")[0] == 0
    assert "was revoked" in cluster.refused("gone", *revoked)
    status, _, err = cluster.command("revoke", "web-9")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "neither an edge" in err
