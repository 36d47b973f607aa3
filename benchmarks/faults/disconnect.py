"""R7: a client goes away. How long until nothing of its request is left on any worker."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.e2e.faults import wait_until_quiet
from tests.support.e2e.server import Server

from benchmarks.faults import witness
from benchmarks.faults.scene import names_of, serving, spread

WORKERS = ("--prefill", "1", "--decode", "1")
AT_ONCE = 16
ANSWER_TOKENS = 6000
LONG_PROMPT_TOKENS = 7000
GIVE_UP_S = 60.0
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A client that asks, waits for `chunks` chunks, and disconnects after a while."""

    prompt_tokens: int = 300
    stream: bool = True
    chunks: int = 0
    after_s: float = 0.0


STREAMING = Case(chunks=30)
CASES = {
    "while it streams": STREAMING,
    "before an answer that is not streamed": Case(stream=False, after_s=0.5),
    "while its prompt is computed": Case(prompt_tokens=LONG_PROMPT_TOKENS, after_s=0.15),
}


class Client:
    """One request on a socket of its own, so that the moment of its end is known."""

    def __init__(self, url: str, rng: Random) -> None:
        self._at = urlsplit(url)
        self._rng = rng
        self.chunk_times_s: list[float] = []

    async def ask(self, prompt_tokens: int, *, stream: bool) -> None:
        host, port = self._at.hostname, self._at.port
        self._reader, self._writer = await asyncio.open_connection(host, port)
        prompt = [self._rng.randrange(5, 890) for _ in range(prompt_tokens)]
        length = min(ANSWER_TOKENS, 8000 - prompt_tokens)
        body = {
            "model": "keeper",
            "prompt": prompt,
            "max_tokens": length,
            "ignore_eos": True,
            "stream": stream,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await self._writer.drain()

    async def read(self, num_chunks: int) -> None:
        while len(self.chunk_times_s) < num_chunks:
            line = await self._reader.readline()
            assert line, "the server closed it"
            if line.startswith(b"data: "):
                self.chunk_times_s.append(time.monotonic())

    def leave(self) -> float:
        """Disconnect and return the time."""
        self._writer.close()
        return time.monotonic()


def disconnects(count: int) -> dict[str, Any]:
    """Let `count` clients disconnect one after another in each case, and then crowds of them together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = folder / "samples"
        samples.mkdir()
        os.environ[witness.FOLDER] = str(samples)
        try:
            with serving(WORKERS, folder / "log", witness.__name__) as server:
                rows = {name: _times(server, samples, [1] * count, case) for name, case in CASES.items()}
                crowds = [AT_ONCE] * max(1, count // 5)
                return {**rows, f"{AT_ONCE} together": _times(server, samples, crowds, STREAMING)}
        finally:
            del os.environ[witness.FOLDER]


def _times(server: Server, samples: Path, crowds: Sequence[int], case: Case) -> dict[str, Any]:
    """Measure crowds of clients, one crowd after the other."""
    rng = Random(repr((crowds, case)))
    freed: list[Freed] = []
    for crowd in crowds:
        wait_until_quiet(server, names_of(server))
        clients = [Client(server.url, rng) for _ in range(crowd)]

        async def come_and_go(clients: Sequence[Client] = clients) -> float:
            await asyncio.gather(*(client.ask(case.prompt_tokens, stream=case.stream) for client in clients))
            await asyncio.gather(*(client.read(case.chunks) for client in clients))
            await asyncio.sleep(case.after_s)
            return min([client.leave() for client in clients])

        left_s = asyncio.run(come_and_go())
        if (found := _freed(samples, left_s)) is not None:
            freed.append(found)
    return {
        "clients": sum(crowds),
        "measured": len(freed),
        "freed_ms": _ms(release.took_s for release in freed),
        "step_ms": _ms(release.step_s for release in freed),
        "beyond_the_step_ms": _ms(max(0.0, release.took_s - release.step_s) for release in freed),
    }


def _ms(seconds: Iterable[float]) -> dict[str, float]:
    return {name: round(1000 * value, 1) for name, value in spread(sorted(seconds)).items()}


class Sample(NamedTuple):
    """The samples that a worker has written: see witness.py."""

    at_s: float
    live_bytes: int
    steps: int


class Freed(NamedTuple):
    """The time until the last worker had freed everything of a client, and the step that ran then."""

    took_s: float
    step_s: float


def _freed(samples: Path, left_s: float) -> Freed | None:
    """None: no worker had anything when the client left."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while True:
        assert time.monotonic() < give_up_s, "memory is still held"
        workers = [
            [Sample(float(at), int(live), int(steps)) for at, live, steps in map(str.split, _lines(file))]
            for file in samples.iterdir()
        ]
        if time.monotonic() > left_s + SETTLE_S and all(
            samples[-1].live_bytes == 0 for samples in workers if samples
        ):
            break
        time.sleep(0.05)
    freed = [
        _freed_of(samples, left_s) for samples in workers if samples and _before(samples, left_s).live_bytes
    ]
    return max(freed, default=None)


def _lines(file: Path) -> list[str]:
    """Whole ones."""
    return file.read_text().split("\n")[:-1]


def _before(worker: Sequence[Sample], at_s: float) -> Sample:
    return [sample for sample in worker if sample.at_s <= at_s or sample is worker[0]][-1]


def _freed_of(worker: Sequence[Sample], left_s: float) -> Freed:
    last = next(sample for sample in reversed(worker) if sample.live_bytes)
    free = worker[worker.index(last) + 1]
    now = _before(worker, left_s)
    began = next(sample for sample in worker if sample.steps == now.steps)
    ended = next(sample for sample in worker if sample.steps > now.steps)
    return Freed(free.at_s - left_s, ended.at_s - began.at_s)
