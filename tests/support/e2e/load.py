"""Load for a paced server, from one process and cheaply: plain HTTP over sockets; what came of each call."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from tests.support.cluster.fake_engine import answer
from tests.support.e2e.server import command_of
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.sources.names import bundled

REUSE_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one call. Times are of the monotonic clock; `text` is the answer's."""

    number: int
    sent_s: float
    ended_s: float
    status: int
    first_s: float | None = None
    text: str = ""
    num_chunks: int = 0
    retry_after: str = ""


def text_of(prompt: Sequence[int], num_tokens: int) -> str:
    """Return the text of the fake engine's answer."""
    decoder = load_tokenizer(bundled()["keeper"]).decoder()
    return "".join(decoder.push(answer(tuple(prompt), index)) for index in range(num_tokens))


@dataclass
class PacedServer:
    """A running `tests.support.e2e.paced`, and its processes by what they are."""

    url: str
    process: psutil.Process

    def processes(self) -> dict[str, psutil.Process]:
        found = {"edge": self.process}
        for child in self.process.children(recursive=True):
            line = command_of(child)
            if "ray::RouterActor" in line:
                found["router"] = child
            elif "ray::WorkerActor" in line:
                found[f"worker {child.pid}"] = child
        return found

    def memory_bytes(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self.processes().items()}

    def cpu_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self.processes().items()}
        return {name: used.user + used.system for name, used in times.items()}


@contextmanager
def paced_server(
    workers: dict[str, str],
    tokens_per_s: int,
    rows_max: int,
    send_s_max: float = 30.0,
    **more: dict[str, Any],
) -> Generator[PacedServer]:
    """`more`: `most` workers of the roles that are scaled, and their `hysteresis`; `others`, models beside
    `paced`, with what is different there. Ends it and all that it started."""
    options = {
        "workers": workers,
        "tokens_per_s": tokens_per_s,
        "rows_max": rows_max,
        "send_s_max": send_s_max,
        **more,
    }
    with tempfile.TemporaryDirectory(prefix="paced-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.e2e.paced", json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        try:
            assert process.stdout is not None
            url = next((line for line in process.stdout if line.startswith("http://")), None)
            assert url is not None, "it does not start"
            yield PacedServer(url.strip(), psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Client:
    """Keeps its connections, as the clients of servers do."""

    url: str
    idle: list[tuple[float, Connection]] = field(default_factory=list[tuple[float, Connection]])
    opened: list[Connection] = field(default_factory=list[Connection])

    async def call(self, number: int, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
        sent_s = time.monotonic()
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await self._connection(host, int(port))
        data = json.dumps(body).encode()
        lines = {
            "host": host,
            "content-type": "application/json",
            "content-length": str(len(data)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        status_line = await reader.readline()
        status = int(status_line.split()[1])
        answered = await _headers(reader)
        first_s: float | None = None
        texts: list[str] = []
        async for part in _parts(reader, answered):
            if first_s is None:
                first_s = time.monotonic()
            texts += _texts(part) if status == 200 else []
        if answered.get("connection") == "close":
            writer.close()
        else:
            self.idle.append((time.monotonic(), (reader, writer)))
        return Outcome(
            number=number,
            sent_s=sent_s,
            ended_s=time.monotonic(),
            status=status,
            first_s=first_s,
            text="".join(texts),
            num_chunks=len(texts),
            retry_after=answered.get("retry-after", ""),
        )

    async def _connection(self, host: str, port: int) -> Connection:
        """Return a recently used connection or a new one, because the server closes idle ones."""
        while self.idle:
            used_s, connection = self.idle.pop()
            if time.monotonic() - used_s < REUSE_S_MAX:
                return connection
        self.opened.append(await asyncio.open_connection(host, port))
        return self.opened[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        del raised
        writers = [writer for _, writer in self.opened]
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def at_rate(
    client: Client,
    rate: float,
    seconds: float,
    body: Callable[[int], dict[str, Any]],
    headers: dict[str, str],
) -> list[Outcome]:
    """Calls at their times, whatever becomes of those before; waits for the last of them."""
    start_s = time.monotonic()
    calls: list[asyncio.Task[Outcome]] = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start_s + number / rate - time.monotonic()))
        calls.append(asyncio.create_task(client.call(number, body(number), headers)))
    return list(await asyncio.gather(*calls))


async def in_turns(client: Client, width: int, count: int, body: dict[str, Any]) -> list[Outcome]:
    """`count` calls, `width` at a time."""
    numbers = iter(range(count))

    async def one_after_another() -> list[Outcome]:
        return [await client.call(number, body, {}) for number in numbers]

    rows: Sequence[list[Outcome]] = await asyncio.gather(*(one_after_another() for _ in range(width)))
    return [outcome for row in rows for outcome in row]


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found: dict[str, str] = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        found[name.lower()] = value.strip()
    return found


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


def _texts(part: bytes) -> list[str]:
    """Return the texts of a chunk's choices, or of a whole answer's."""
    if part.startswith(b"{"):
        return [json.loads(part)["choices"][0]["text"]]
    events = [line.removeprefix(b"data: ") for line in part.split(b"\n") if line.startswith(b"data: ")]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    assert not any("error" in chunk for chunk in chunks), chunks
    return [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
