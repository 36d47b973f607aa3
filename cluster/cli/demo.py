"""`tidemill demo`: ask the bundled questions, check the answers, show where prompt tokens came from."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved

TIMEOUT_S = 60
ANSWER_TOKENS_MAX = 48


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A question, its answer, and the usage that the server reported."""

    question: str
    expected: str
    answer: str
    usage: dict[str, Any]

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.expected.strip()


async def run_demo(base_url: str, model: str, folder: Path, console: Console) -> bool:
    """Ask the questions of `folder`/demo.json; return whether all answers are right. Raises TidemillError."""
    demo = read_demo(folder / "demo.json")
    notebook: str = demo["notebook"]
    console.print(Text(notebook, style="dim"), "\n")
    answers: list[DemoAnswer] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False) as client:
        page_tokens = await _page_tokens(client)
        for item in demo["questions"]:
            console.print(Text(f"  {item['question']}", style="bold"))
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"{notebook} {item['question']}"}],
                "temperature": 0,
                "max_tokens": ANSWER_TOKENS_MAX,
            }
            console.print("   ", end="")
            # The first answer is streamed.
            answer, usage = await (_ask if answers else _ask_streaming)(client, body, console)
            answers.append(DemoAnswer(item["question"], item["answer"], answer, usage))
            _print_verdict(console, answers[-1])
    console.print(pages_table(answers, page_tokens))
    num_right = sum(answer.right for answer in answers)
    console.print(f"\n{num_right} of {len(answers)} answers are right")
    return bool(answers) and num_right == len(answers)


def pages_table(answers: list[DemoAnswer], page_tokens: int) -> Table:
    """Return a table of where the tokens of each prompt came from, as full pages and tokens."""
    table = Table(
        title=f"\nWhere the prompts came from (p: pages of {page_tokens} tokens, t: tokens)",
        title_justify="left",
        caption="the decode worker has the tokens that it fetched, replayed and reused",
        caption_justify="left",
        box=None,
    )
    for column in (
        "question",
        "prompt",
        "computed by prefill",
        "fetched by decode",
        "replayed tail",
        "reused",
    ):
        table.add_column(column, justify="right")
    for index, answer in enumerate(answers, start=1):
        details = answer.usage["prompt_tokens_details"]
        counts = [details[f"{source}_tokens"] for source in ("prefilled", "fetched", "replayed", "reused")]
        cells = (_pages(count, page_tokens) for count in (answer.usage["prompt_tokens"], *counts))
        table.add_row(str(index), *cells)
    return table


def _pages(num_tokens: int, page_tokens: int) -> str:
    pages, rest = divmod(num_tokens, page_tokens)
    if not num_tokens:
        return "-"
    return " + ".join([f"{pages} p"] * (pages > 0) + [f"{rest} t"] * (rest > 0))


def _print_verdict(console: Console, answer: DemoAnswer) -> None:
    verdict = Text("right", style="green") if answer.right else Text("wrong", style="red")
    console.print(Text(f"   expected: {answer.expected}", style="dim"), verdict)


def read_demo(path: Path) -> dict[str, Any]:
    """Return the notebook and the questions of the bundled model. Raises TidemillError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TidemillError(f"cannot read {path}, run the demo with the bundled model: {error}") from error


async def _page_tokens(client: httpx.AsyncClient) -> int:
    response = await client.get("/cluster")
    check(response)
    return response.json()["workers"][0]["info"]["page_tokens"]


async def _ask(
    client: httpx.AsyncClient, body: dict[str, Any], console: Console
) -> tuple[str, dict[str, Any]]:
    response = await client.post("/v1/chat/completions", json=body)
    check(response)
    reply = response.json()
    answer = reply["choices"][0]["message"]["content"]
    console.print(Text(answer), end="")
    return answer, reply["usage"]


async def _ask_streaming(
    client: httpx.AsyncClient, body: dict[str, Any], console: Console
) -> tuple[str, dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer, usage = "", dict[str, Any]()
    async for chunk in chunks(client, "/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            answer += choice["delta"]["content"]
            console.print(Text(choice["delta"]["content"]), end="")
    console.print(Text(" (streamed)", style="dim"), end="")
    return answer, usage


async def chunks(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer. Raises Unserved."""
    async with client.stream("POST", path, json=body, headers=headers) as response:
        if response.is_error:
            await response.aread()
        check(response)
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Unserved(chunk["error"]["message"])
            yield chunk


def check(response: httpx.Response) -> None:
    """Raises Unserved for an error reply."""
    if response.is_error:
        raise Unserved(f"{response.request.url} answered HTTP {response.status_code}: {response.text[:500]}")
