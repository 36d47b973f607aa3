"""`tidemill demo --kill`: one answer twice, the second time with `kill -9` of its worker in the middle."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from tidemill.cluster.cli.demo import TIMEOUT_S, check, chunks, read_demo
from tidemill.kvstore.errors import TidemillError

NUM_TOKENS = 600
KILL_AFTER_TOKENS = 150
SEED = 7
"""The seed of all draws at temperature 1: a greedy answer of the bundled model repeats itself."""

CALM, KILLED = "calm", "killed"


@dataclass(slots=True)
class KilledAnswer:
    """An answer with all its tokens, and the offset of the text at which its worker was killed."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    killed_at: int | None = None


async def run_kill(base_url: str, model: str, folder: Path, console: Console) -> bool:
    """Show both answers and their diff; return whether they are equal although a worker was killed. Raises
    TidemillError."""
    demo = read_demo(folder / "demo.json")
    prompt = f"{demo['notebook']} {demo['questions'][0]['question']}"
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False) as client:
        calm = await _stream(client, model, prompt, CALM)
        _show(console, "without a kill", calm)

        async def kill() -> None:
            worker, pid = await _worker_of(client, KILLED)
            os.kill(pid, signal.SIGKILL)
            console.print(Text(f"kill -9 {pid}: the process of {worker}, which generates", style="red"))

        killed = await _stream(client, model, prompt, KILLED, kill)
        row = await _row(client, KILLED)
    _show(console, f"killed at |, finished by {row['decode']}", killed)
    diff = list(unified_diff(calm.text.split(". "), killed.text.split(". "), "calm", "killed", lineterm=""))
    console.print(Text("diff: none" if not diff else "\n".join(diff), style="bold"))
    same = calm.tokens == killed.tokens and not diff
    console.print(
        f"{len(killed.tokens)} tokens, {'all equal' if same else 'not equal'}; {row['attempts']} workers"
    )
    if row["attempts"] < 2:
        raise TidemillError("the answer was complete before its worker was killed: run the demo again")
    return same


async def _stream(
    client: httpx.AsyncClient,
    model: str,
    prompt: str,
    name: str,
    kill: Callable[[], Awaitable[None]] | None = None,
) -> KilledAnswer:
    """Return the answer of the request `name`; call `kill` in its middle."""
    found = KilledAnswer()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "seed": SEED,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async for chunk in chunks(client, "/v1/completions", body, {"x-request-id": name}):
        found.text += chunk["choices"][0]["text"]
        found.tokens += chunk["choices"][0]["token_ids"]
        if kill is not None and found.killed_at is None and len(found.tokens) >= KILL_AFTER_TOKENS:
            found.killed_at = len(found.text)
            await kill()
    return found


async def _row(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Return what the server recorded of the request `name`."""
    response = await client.get("/cluster/requests")
    check(response)
    return next(row for row in response.json()["requests"] if row["request_id"] == name)


async def _worker_of(client: httpx.AsyncClient, name: str) -> tuple[str, int]:
    """Return the worker that generates a request, and its process."""
    row, response = await asyncio.gather(_row(client, name), client.get("/cluster"))
    check(response)
    pids = {worker["info"]["worker"]: worker["info"]["pid"] for worker in response.json()["workers"]}
    return row["decode"], pids[row["decode"]]


def _show(console: Console, title: str, answer: KilledAnswer) -> None:
    cut = len(answer.text) if answer.killed_at is None else answer.killed_at
    mark = "" if answer.killed_at is None else "|"
    text = Text.assemble(answer.text[:cut], (mark, "bold red"), (answer.text[cut:], "green"))
    console.print(Text(f"\n{title}:", style="bold"), text, sep="\n")
