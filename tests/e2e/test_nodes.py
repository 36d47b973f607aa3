"""Several nodes: prefill on one and decode on the others, one lost and one added under load, a bad line, two
versions side by side, a worker whose ranks are on two nodes.
"""

import asyncio
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import Random

import httpx
import pytest
import trustme
import yaml

import tidemill
from tests.support.e2e import tun
from tests.support.e2e.alone import Alone, keeper_alone
from tests.support.e2e.nodes import HEAD, NET, Nodes
from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, eventually, run_cli
from tests.support.e2e.streams import (
    Body,
    Outcome,
    Stream,
    client_of,
    completion,
    outcomes_of,
    random_prompt,
    run_while,
)
from tests.support.e2e.tun import Loss
from tests.support.workers.ranks import ENDED, GRANULE, Around
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.frames import Verb, ints
from tidemill.workers.parallel.link import accept, meeting_place
from tidemill.workers.parallel.network import Network

pytestmark = pytest.mark.slow

FAR, NEW, NEXT = f"{NET}.3", f"{NET}.4", f"{NET}.5"
STREAMS = 8
LINES = 4
LOOK_S = 0.1
JOINED = f"{NET}.6"
BESIDE = """
import sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tidemill.cluster.processes.supervisor import BESIDE

class Actor:
    def node(self):
        return ray.get_runtime_context().get_node_id()

ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False, logging_level="error")
own = ray.get_runtime_context().get_node_id()
here = NodeAffinitySchedulingStrategy(own, soft=True)
for name in "abcd":
    actor = ray.remote(Actor).options(**BESIDE, name=name, scheduling_strategy=here).remote()
    assert ray.get(actor.node.remote()) == own, name
    ray.kill(actor)
"""
APART = f"tide{os.getpid() % 10**6}"
LINE_NEAR, LINE_FAR = (f"10.{NET.split('.')[1]}.{NET.split('.')[2]}.{end}" for end in (1, 2))


def bodies(seed: int, max_tokens: int = 200) -> list[Body]:
    """Return requests whose prompts no other request has."""
    rng = Random(seed)
    return [
        completion(random_prompt(rng, 200 + 30 * index), max_tokens, temperature=index % 2, seed=index)
        for index in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with keeper_alone() as alone:
        yield alone


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:  # a short path, for Ray's sockets
        (Path(folder) / "store").mkdir()
        yield Path(folder)


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder, labels="side=near")
    try:
        yield nodes
    finally:
        nodes.kill()


@contextmanager
def serving(
    nodes: Nodes,
    folder: Path,
    namespace: str,
    store: str,
    groups: list[Body],
    cluster: Body | None = None,
) -> Generator[Server]:
    config = {
        "models": [{"model": "keeper", "groups": [{**group, "memory": "64MiB"} for group in groups]}],
        "store": {"url": store},
        "edge": {"port": 0},
        "cluster": {
            "ray_address": nodes.address,
            "namespace": namespace,
            **(cluster or {"host": "node-plain"}),
        },
    }
    file = folder / f"{namespace}.yaml"
    file.write_text(yaml.safe_dump(config))
    with nodes.serve(file, folder / f"{namespace}.log") as server:
        yield server


@pytest.fixture(scope="module")
def server(nodes: Nodes, folder: Path) -> Iterator[Server]:
    """One worker for prefill beside the server, and decode workers wherever there is a place."""
    nodes.add(FAR)
    groups = [{"role": "prefill", "labels": {"side": "near"}}, {"role": "decode", "replicas": 2}]
    with serving(nodes, folder, "shared", f"file://{folder}/store?size=256MiB", groups) as server:
        yield server


def homes(server: Server) -> dict[str, str]:
    """The node of each worker that the router knows."""
    return {row["info"]["name"]: row["info"]["node"] for row in server.workers()}


def outcomes(server: Server, asked: list[Body]) -> list[Outcome]:
    return outcomes_of(server.url, asked)


def wait_until_fetched(server: Server, name: str, seed: int) -> None:
    """Wait until this worker has read pages from the store that another worker put there."""

    def is_used() -> bool:
        outcomes(server, bodies(seed, max_tokens=4))
        rows = {row["info"]["name"]: row["load"]["counters"] for row in server.workers()}
        return rows.get(name, {}).get("store_gets_as_hit", 0) > 0

    eventually(is_used)


def test_prefill_on_one_node_and_decode_on_two(server: Server, alone: Alone) -> None:
    """All nodes share a folder."""
    eventually(lambda: homes(server) == {"prefill-0": HEAD, "decode-0": FAR, "decode-1": HEAD})
    asked = bodies(1)
    assert outcomes(server, asked) == alone(asked)
    wait_until_fetched(server, "decode-0", seed=2)


def test_streams_survive_the_loss_of_a_node(server: Server, nodes: Nodes, alone: Alone) -> None:
    """Kill all processes of a node; its streams and its worker continue elsewhere."""
    asked = bodies(3, max_tokens=400)
    streams = run_while(server.url, asked, lambda: nodes.kill(FAR))
    assert [stream.outcome for stream in streams] == alone(asked)
    eventually(lambda: homes(server) == {"prefill-0": HEAD, "decode-0": HEAD, "decode-1": HEAD})
    assert outcomes(server, asked) == alone(asked)


async def test_node_that_joins_under_load_takes_work(server: Server, nodes: Nodes, alone: Alone) -> None:
    streams: list[Stream] = []

    async def line(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        """Prompts that no worker has, so that all are equally good for them."""
        while not done.is_set():
            number = len(streams)
            streams.append(Stream(bodies(100 + number)[number % STREAMS]))
            await streams[number].run(client)

    async def until_it_works(client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(add_node, nodes)
        answer = await client.post("/cluster/scale", json={"workers": {"decode": 3}})
        assert answer.status_code == httpx.codes.OK, answer.text
        async with asyncio.timeout(EVENTUALLY_S_MAX):
            while True:
                rows = (await client.get("/cluster")).json()["workers"]
                if any(row["info"]["node"] == NEW and row["load"]["running_rows"] for row in rows):
                    return
                await asyncio.sleep(LOOK_S)

    done = asyncio.Event()
    async with client_of(server.url) as client, asyncio.TaskGroup() as running:
        for _ in range(LINES):
            running.create_task(line(client, done))
        await until_it_works(client)
        done.set()
    eventually(lambda: homes(server).get("decode-2") == NEW)
    assert [stream.outcome for stream in streams] == alone([stream.body for stream in streams])


def add_node(nodes: Nodes) -> None:
    if not nodes.processes(NEW):
        nodes.add(NEW, "side=far")


def test_supervisor_starts_on_its_node_also_when_that_has_just_joined(nodes: Nodes) -> None:
    nodes.add(JOINED)
    try:
        ended = nodes.run(sys.executable, "-c", BESIDE, nodes.address, JOINED)
        assert ended.returncode == 0, ended.stderr
    finally:
        nodes.kill(JOINED)


@pytest.fixture(scope="module")
def split(nodes: Nodes, folder: Path) -> Iterator[Server]:
    """Prefill on one node, decode on the other; Mooncake between them."""
    add_node(nodes)
    groups = [{"role": "prefill", "labels": {"side": "near"}}, {"role": "decode", "labels": {"side": "far"}}]
    store = f"mooncake?size=256MiB&host={HEAD}&timeout=5s"
    with serving(nodes, folder, "split", store, groups) as server:
        yield server


def test_mooncake_moves_pages_between_two_nodes(split: Server, alone: Alone) -> None:
    eventually(lambda: homes(split) == {"prefill-0": HEAD, "decode-0": NEW})
    asked = bodies(5)
    assert outcomes(split, asked) == alone(asked)
    wait_until_fetched(split, "decode-0", seed=6)


@pytest.fixture(scope="module")
def next_version(nodes: Nodes, folder: Path) -> None:
    """Install another version on one node: the same code with another storage layout."""
    package = folder / "later" / "tidemill"
    shutil.copytree(Path(tidemill.__file__).parent, package)
    layout = package / "kvstore" / "layout.py"
    text, found = re.subn(
        r"^LAYOUT_VERSION = \d+$", "LAYOUT_VERSION = 4711", layout.read_text(), flags=re.MULTILINE
    )
    assert found == 1
    layout.write_text(text)
    nodes.add(NEXT, "side=next", PYTHONPATH=str(folder / "later"))


@pytest.mark.usefixtures("next_version")
def test_rolling_update_loses_no_token(nodes: Nodes, folder: Path, alone: Alone) -> None:
    """Workers of two versions serve side by side, with certificates between all processes of all nodes; then
    the older one hands its streams over. Neither has a page of the other."""
    tls = issue(folder / "tls", trustme.CA())
    names = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.ca}
    groups = [
        {"role": "prefill", "labels": {"side": "near"}},
        {"role": "decode", "labels": {"side": "near"}},
        {"role": "decode", "labels": {"side": "next"}},
    ]
    cluster = {"host": "node", **{name: str(path) for name, path in names.items()}}
    store = f"file://{folder}/store?size=256MiB"
    with serving(nodes, folder, "update", store, groups, cluster) as server:
        eventually(lambda: homes(server) == {"prefill-0": HEAD, "decode-0": HEAD, "decode-1": NEXT})
        layouts = {row["info"]["name"]: row["info"]["layout"] for row in server.workers()}
        assert layouts["prefill-0"] == layouts["decode-0"] != layouts["decode-1"]

        seeds = count(2000)

        def worked() -> dict[str, dict[str, float]]:
            """Return each worker's counters after new prompts."""
            asked = bodies(next(seeds))
            assert outcomes(server, asked) == alone(asked)
            return {row["info"]["name"]: row["load"]["counters"] for row in server.workers()}

        eventually(lambda: min(worked()[name]["published_bytes"] for name in ("decode-0", "decode-1")) > 0)
        assert worked()["decode-1"]["fetched_bytes"] == 0, "pages of another version"

        asked = bodies(next(seeds), max_tokens=600)
        streams = run_while(server.url, asked, lambda: drained(server, "decode-0"))
        assert [stream.outcome for stream in streams] == alone(asked)
        assert worked()["decode-1"]["fetched_bytes"] == 0


def drained(server: Server, name: str) -> None:
    """Drain a worker and wait until it is empty."""
    answer = httpx.post(f"{server.url}/cluster/workers/{name}/drain", json={"drain": True}, timeout=300)
    assert answer.status_code == httpx.codes.OK, answer.text

    def is_empty() -> bool:
        rows = [row for row in server.workers() if row["info"]["name"] == name]
        return [(row["state"], row["load"]["running_rows"]) for row in rows] == [("draining", 0)]

    eventually(is_empty)


@pytest.fixture
def line(folder: Path) -> Iterator[Callable[[Loss], None]]:
    """Yield a link to a network of its own that has no other way out."""
    weather = folder / "packets"

    def change(loss: Loss) -> None:
        (folder / "packets.new").write_text(json.dumps(asdict(loss)))
        (folder / "packets.new").rename(weather)

    change(Loss())
    command = [sys.executable, tun.__file__, APART, LINE_NEAR, LINE_FAR, str(weather)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == tun.READY
        yield change
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes networks")
def test_cluster_works_over_a_link_that_loses_packets(line: Callable[[Loss], None], alone: Alone) -> None:
    """Ray, tokens, heartbeats and Mooncake's pages all cross the link."""
    with tempfile.TemporaryDirectory(prefix="line-") as short:
        folder = Path(short)
        nodes = Nodes(folder, labels="side=near", head=LINE_NEAR)
        try:
            nodes.add(LINE_FAR, "side=far", APART)
            store = f"mooncake?size=256MiB&host={LINE_NEAR}&timeout=20s"
            sides = [("prefill", "near"), ("decode", "far")]
            groups: list[Body] = [{"role": role, "labels": {"side": side}} for role, side in sides]
            with serving(nodes, folder, "line", store, groups) as server:
                eventually(lambda: homes(server) == {"prefill-0": LINE_NEAR, "decode-0": LINE_FAR})
                wait_until_fetched(server, "decode-0", seed=40)
                before = server.lives()
                fetched = server.counter("fetched_bytes")
                line(Loss(delay_s=0.1, lost_share=0.01))
                seeds = count(3000)

                def is_fetched() -> bool:
                    asked = bodies(next(seeds))
                    assert outcomes(server, asked) == alone(asked)
                    return server.counter("fetched_bytes") > fetched

                eventually(is_fetched)
                line(Loss())
                assert outcomes(server, bodies(41)) == alone(bodies(41))
                eventually(lambda: server.lives() == before)
        finally:
            nodes.kill()


def rank_nodes(nodes: Nodes, hosts: list[str]) -> list[str]:
    """Return the nodes with a rank other than a leader."""
    return [
        host
        for host in hosts
        for process in nodes.processes(host)
        if "ray::RankActor" in " ".join(process.cmdline()[:1])
    ]


def test_group_over_two_nodes_survives_the_loss_of_one(alone: Alone) -> None:
    """Two ranks on two nodes with certificates, behind a prefill worker of one rank. The node of the rank is
    lost amid streams: they continue on another worker, and the group on the node that is left and a new
    one."""
    head, *far = (f"{NET}.{end}" for end in (12, 13, 14, 15))
    with tempfile.TemporaryDirectory(prefix="group-") as short:
        folder = Path(short)
        (folder / "store").mkdir()
        tls = issue(folder / "tls", trustme.CA())
        names = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.ca}
        cluster = {"host": "node", **{name: str(path) for name, path in names.items()}}
        groups: list[Body] = [
            {"role": "prefill", "labels": {"side": "near"}},
            {"role": "decode", "labels": {"side": "near"}},
            {
                "role": "decode",
                "labels": {"side": "far"},
                "num_cpus": 1,  # all that a node has
                "tensor_parallel_size": 2,
                "tensor_parallel_nodes": 2,
            },
        ]
        nodes = Nodes(folder, labels="side=near", head=head)
        try:
            for host in far[:2]:
                nodes.add(host, "side=far")
            store = f"file://{folder}/store?size=256MiB"
            with serving(nodes, folder, "group", store, groups, cluster) as server:
                eventually(lambda: set(homes(server)) == {"prefill-0", "decode-0", "decode-1"})
                assert outcomes(server, bodies(60)) == alone(bodies(60))
                wait_until_fetched(server, "decode-1", seed=61)
                (lost,) = rank_nodes(nodes, far)
                (kept,) = (host for host in far[:2] if host != lost)
                assert homes(server)["decode-1"] == kept

                def lose() -> None:
                    eventually(lambda: running_rows(server, "decode-1") > 0)
                    nodes.kill(lost)

                asked = bodies(62, max_tokens=600)
                streams = run_while(server.url, asked, lose)
                assert [stream.outcome for stream in streams] == alone(asked)
                nodes.add(far[2], "side=far")
                eventually(lambda: rank_nodes(nodes, far) == [far[2]] and "decode-1" in homes(server))

                def is_used() -> bool:
                    streams = run_while(server.url, bodies(63), lambda: None)
                    assert [stream.outcome for stream in streams] == alone(bodies(63))
                    rows = {row["info"]["name"]: row["load"]["counters"] for row in server.workers()}
                    return rows.get("decode-1", {}).get("generated_tokens", 0) > 0

                eventually(is_used)
        finally:
            nodes.kill()


def running_rows(server: Server, name: str) -> int:
    return sum(row["load"]["running_rows"] for row in server.workers() if row["info"]["name"] == name)


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes networks")
@pytest.mark.parametrize("is_idle", [True, False])
def test_both_ends_of_a_group_notice_that_their_line_is_cut(
    line: Callable[[Loss], None], tmp_path: Path, *, is_idle: bool
) -> None:
    """The leader ends the group, and the rank ends itself, though neither kernel learns of an end."""
    tls = issue(tmp_path / "tls", trustme.CA())
    network = Network(host=LINE_NEAR, certificates=tls)
    run = "import pickle, sys; from tests.support.workers import ranks; "
    run += "ranks.rank(pickle.load(sys.stdin.buffer), 1)"
    with meeting_place(network) as place:
        command = ["ip", "netns", "exec", APART, sys.executable, "-c", run]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            assert process.stdin is not None
            with process.stdin as pipe:
                pickle.dump(Around(tmp_path, place.meeting, tls), pipe)
            links = accept(place, 2, lambda: None, network)
            (link,) = links
            link.ready.result(EVENTUALLY_S_MAX)
            line(Loss(lost_share=1.0))
            if not is_idle:
                links.send_all(Verb.UNMAP, ints((0, GRANULE)))
            with pytest.raises(GroupBroken, match="rank 1 is gone"):
                links.broken.result(EVENTUALLY_S_MAX)
            assert process.wait(EVENTUALLY_S_MAX) == ENDED
        finally:
            process.kill()
            process.wait()


def test_resources_that_no_node_has_are_reported(tmp_path: Path) -> None:
    group = {"num_cpus": 0.5, "resources": {"fast": 1}, "labels": {"side": "far"}}
    groups = [{"role": "prefill"}, {"role": "decode", "replicas": 2, **group}]
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"models": [{"model": "keeper", "groups": groups}], "edge": {"port": 0}}))
    ended, left = run_cli("serve", "--config", str(file))
    assert ended.returncode == 2
    assert "decode-0 needs {CPU: 0.5, fast: 1, label side=far} on one node (and 1 more" in ended.stderr
    assert "has no label side. Add a node" in ended.stderr
    assert left == []
