"""Fleets on real Ray that grow and shrink, by load and by hand, under load: every stream stays exact."""

import asyncio
import json
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.load import Client, client_of, paced_server, text_of
from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, command_of, eventually, run_cli
from tests.support.e2e.streams import completion

pytestmark = pytest.mark.slow

ROLES = ("decode", "prefill")
ROWS_MAX = 8
ENGINE = {"max_num_batched_tokens": 640, "max_num_seqs": ROWS_MAX}
SCALED = {
    "served_model_name": "paced",
    "engine": ENGINE,
    "groups": [{"role": role, "replicas_max": 2, "memory": "1GiB"} for role in ROLES],
    "autoscaling": {"metrics_interval_s": 0.25, "upscale_delay_s": 1.5, "downscale_delay_s": 3.0},
}
FIXED = {
    "served_model_name": "fixed",
    "engine": ENGINE,
    "groups": [{"role": "mixed", "memory": "1GiB"}],
}
PROMPT_TOKENS = 640  # long enough for a prefill worker
SHORT_TOKENS = 60  # short enough for a decode worker
STREAM_TOKENS = 300
LOOK_S = 0.1


@dataclass
class Load:
    """A load of calls, one after another in each of its lines, until it is stopped. All are checked."""

    client: Client
    model: str = "paced"
    numbers: list[int] = field(default_factory=list[int])
    ends: asyncio.Event = field(default_factory=asyncio.Event)

    async def line(self, num_tokens: int, new_tokens: int) -> None:
        while not self.ends.is_set():
            await self.call(num_tokens, new_tokens)

    async def call(self, num_tokens: int, new_tokens: int) -> None:
        number = len(self.numbers)
        self.numbers.append(number)
        prompt = [
            100 + number % 700,
            100 + number // 700,
            *[100 + index % 700 for index in range(num_tokens)],
        ]
        body = completion(prompt, new_tokens, model=self.model, stream=True)
        outcome = await self.client.call(number, body, {})
        assert outcome.status == 200, outcome
        assert outcome.text == text_of(prompt, new_tokens)


@dataclass
class Fleet:
    """The rows of `tidemill status` as they were seen last, and the workers that ever had work."""

    url: str
    model: str = "paced"
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    worked: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # processes of each role

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(EVENTUALLY_S_MAX), httpx.AsyncClient(timeout=60) as client:
            while True:
                rows = (await client.get(f"{self.url}/cluster")).json()["workers"]
                self.rows = [row for row in rows if row["model"] == self.model]
                for row in self.rows:
                    if row["load"]["counters"]["taken"]:
                        self.worked.setdefault(row["info"]["role"], set()).add(row["info"]["pid"])
                if holds():
                    return
                await asyncio.sleep(LOOK_S)

    def has_grown(self) -> bool:
        """Return whether more than one worker of each role has had work."""
        return self.worked.keys() == set(ROLES) and min(map(len, self.worked.values())) > 1

    def is_least(self) -> bool:
        """One of each role, whichever."""
        return sorted(row["info"]["role"] for row in self.rows) == list(ROLES)

    def names(self) -> list[str]:
        return sorted(row["info"]["name"] for row in self.rows)


async def test_workers_are_added_and_removed_by_load_and_by_command(tmp_path: Path) -> None:
    with paced_server(SCALED, FIXED) as server:
        async with client_of(server.url) as client:
            await scale(client, server)
            await scale_by_hand(client, server)
        await look(server, tmp_path)


async def scale(client: Client, server: Server) -> None:
    fleet, busy = Fleet(server.url), Load(client)
    await fleet.until(fleet.is_least)
    before = num_processes(server)
    async with asyncio.TaskGroup() as calls:
        for _ in range(ROWS_MAX - 1):
            calls.create_task(busy.line(SHORT_TOKENS, STREAM_TOKENS))
        for _ in range(4):
            calls.create_task(busy.line(PROMPT_TOKENS, 2))
        await fleet.until(fleet.has_grown)
        busy.ends.set()

    calm = Load(client)
    async with asyncio.TaskGroup() as calls:
        for _ in range(3):
            calls.create_task(calm.line(SHORT_TOKENS, STREAM_TOKENS))
        await fleet.until(fleet.is_least)  # its streams go on elsewhere
        calm.ends.set()
    await asyncio.to_thread(eventually, lambda: num_processes(server) == before)
    assert {row["state"] for row in fleet.rows} == {"ready"}


async def scale_by_hand(client: Client, server: Server) -> None:
    """`tidemill scale`, of the fleet that load does not scale, with more streams than one worker takes."""
    fleet, busy = Fleet(server.url, "fixed"), Load(client, "fixed")
    before = num_processes(server)
    async with asyncio.TaskGroup() as calls:
        for _ in range(2 * ROWS_MAX):
            calls.create_task(busy.line(SHORT_TOKENS, STREAM_TOKENS))
        more = await run_command(server, "scale", "mixed=3", "--model", "fixed", "--wait", "--json")
        assert json.loads(more.stdout)["roles"][0]["workers"] == 3, more
        await fleet.until(lambda: len(fleet.worked.get("mixed", ())) == 3)
        assert fleet.names() == ["fixed-mixed-0", "fixed-mixed-1", "fixed-mixed-2"]
        fewer = await run_command(server, "scale", "mixed=1", "--model", "fixed", "--wait")
        assert "mixed" in fewer.stdout
        await fleet.until(lambda: len(fleet.rows) == 1)
        busy.ends.set()  # those that were handed over end as exactly as the others
    await asyncio.to_thread(eventually, lambda: num_processes(server) == before)
    assert {row["state"] for row in fleet.rows} == {"ready"}
    refused = await run_command(server, "scale", "mixed=0", "--model", "fixed", status=2)
    assert "one mixed worker has to stay" in refused.stderr


async def look(server: Server, folder: Path) -> None:
    """Check what operators send, of a server that has answered."""
    bundle = folder / "bundle.tar.gz"
    await run_command(server, "support-bundle", "-o", str(bundle))
    with tarfile.open(bundle) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert set(json.loads(texts["index.json"])["parts"].values()) == {"ok"}
    assert len(json.loads(texts["nodes.json"])["nodes"]) == 1
    config = json.loads(texts["config.json"])["config"]
    assert [fleet["names"] for fleet in config["cluster"]["fleets"]] == [["paced"], ["fixed"]]
    assert json.loads(texts["requests.json"])["requests"]
    assert "raylet.out" in texts, sorted(texts)


def num_processes(server: Server) -> int:
    return sum("ray::WorkerActor" in command_of(process) for process in server.processes())


async def run_command(server: Server, *words: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """A command that asks this server, once it has ended, with nothing left of it."""
    ended, alive = await asyncio.to_thread(run_cli, *words, "--url", server.url)
    assert ended.returncode == status, ended
    assert not alive
    return ended
