"""A fleet on real Ray that grows under load and shrinks after it: every stream stays exact."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.load import Client, PacedServer, paced_server
from tests.e2e.paced import answer
from tests.e2e.server import EVENTUALLY_S_MAX
from tidemill.workers.api.tokenizer import load_tokenizer
from tidemill.workers.models.bundled import bundled

LEAST = {"prefill-0": "prefill", "decode-0": "decode"}
MOST = {"prefill": 2, "decode": 2}
TOKENS_PER_S = 640
ROWS_MAX = 8
HYSTERESIS = {"look_s": 0.25, "up_s": 1.5, "down_s": 3.0, "cool_s": 0.5, "start_s_max": 120.0, "drain_s": 5.0}
PROMPT_TOKENS = 640  # long enough for a prefill worker
SHORT_TOKENS = 60  # short enough for a decode worker
STREAM_TOKENS = 300
LOOK_S = 0.1


@dataclass
class Load:
    """Calls one after another in each of its lines, until it is told to end; all are checked."""

    client: Client
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
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True}
        outcome = await self.client.call(number, {**body, "stream": True}, {})
        decoder = load_tokenizer(bundled()["keeper"]).decoder()
        assert outcome.status == 200, outcome
        assert outcome.text == "".join(
            decoder.push(answer(tuple(prompt), index)) for index in range(new_tokens)
        )


@dataclass
class Fleet:
    """The rows of `tidemill status` as they were seen last, and the workers that ever had work."""

    url: str
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    worked: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # processes of each role

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(EVENTUALLY_S_MAX), httpx.AsyncClient(timeout=60) as client:
            while True:
                self.rows = (await client.get(f"{self.url}/cluster")).json()["workers"]
                for row in self.rows:
                    if row["load"]["counters"]["taken"]:
                        self.worked.setdefault(row["info"]["role"], set()).add(row["info"]["pid"])
                if holds():
                    return
                await asyncio.sleep(LOOK_S)

    def has_grown(self) -> bool:
        """In each role more than one has had work."""
        return self.worked.keys() == MOST.keys() and min(map(len, self.worked.values())) > 1

    def is_least(self) -> bool:
        """One of each role, whichever."""
        return sorted(row["info"]["role"] for row in self.rows) == sorted(LEAST.values())


def test_workers_come_under_load_and_go_after_it() -> None:
    async def main(server: PacedServer) -> None:
        async with Client(server.url) as client:
            await scale(client, server)

    with paced_server(LEAST, TOKENS_PER_S, ROWS_MAX, most=MOST, hysteresis=HYSTERESIS) as server:
        asyncio.run(main(server))


async def scale(client: Client, server: PacedServer) -> None:
    fleet, busy = Fleet(server.url), Load(client)
    await fleet.until(fleet.is_least)
    before = len(server.processes())
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
    assert len(server.processes()) == before
    assert {row["state"] for row in fleet.rows} == {"ready"}
