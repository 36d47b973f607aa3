"""`tidemill` with workers whose model writes what its prompt orders.

The real engine computes each token, and a grammar leaves it no other one.

    python -m tests.clients.obedient serve keeper

An order stands in a message of the user, in base64, which no client escapes. It is a JSON list: calls of
tools ({"name": ..., "arguments": {...}}) and, at its end, a text. After each result of a tool the next one is
due. The worker writes the prompts that it gets into the model's folder.
"""

import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.cluster.edge.chat.tokenizer import text_of
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.contract.engine import Progress
from tidemill.workers.engine import build as workers
from tidemill.workers.engine.engine import Engine
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import Delta, Grammar, Request
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import EngineSettings

ORDER = re.compile(r"Obey: ([\w+/]+=*)")
RESULT = "\n<|tool|> "
PROMPTS = "prompts.jsonl"
"""Its lines are the id of a request and its tokens."""
IDLE = "Nothing was ordered."


def order(answers: Sequence[Mapping[str, Any] | str]) -> str:
    """Return a message that orders calls and a text."""
    return f"Obey: {b64encode(json.dumps(answers).encode()).decode()}"


def due(prompt: str) -> str:
    """Return the words that are due behind a prompt."""
    orders = list(ORDER.finditer(prompt))
    if not orders:
        return IDLE
    answers = json.loads(b64decode(orders[-1][1]))
    words = answers[min(prompt.count(RESULT, orders[-1].end()), len(answers) - 1)]
    return words if isinstance(words, str) else f"<tool_call>\n{json.dumps(words)}\n</tool_call>"


class ObedientEngine(Engine):
    """Gives each answer the grammar of the words that are due."""

    folder: ClassVar[Path]

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        prompt = request.tokens[: len(request.tokens) - request.drawn]
        words = due(text_of(load_tokenizer(self.folder), prompt))
        with (self.folder / PROMPTS).open("a") as file:
            file.write(f"{json.dumps([request.request_id, prompt])}\n")
        sampling = replace(request.sampling, grammar=Grammar(kind="regex", text=re.escape(words)))
        await super().stream(replace(request, sampling=sampling), emit, notify)


def build(settings: EngineSettings, progress: Progress, start_ranks: StartRanks) -> workers.BuiltEngine:
    ObedientEngine.folder = settings.model_folder
    workers.Engine = ObedientEngine
    return workers.build_engine(settings, progress, start_ranks)


if __name__ == "__main__":
    fleets.WorkerSettings = partial(fleets.WorkerSettings, build="tests.clients.obedient:build")  # pyrefly: ignore[bad-assignment]
    sys.exit(cli.main())
