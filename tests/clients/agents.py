"""Coding agents, unmodified, each of which reads and edits a file in two conversations. `make agents`
installs them. The model of their server writes what the prompts order.

python -m tests.clients.agents --environments .venv/clients [NAMES]

The engine computes keeper, a hybrid model, so the tokens that its cache has found are those of any server.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import httpx

from tests.clients.loads import report, run
from tests.clients.obedient import PROMPTS, order
from tests.support.e2e.server import Server
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.sources.names import bundled

MODEL = "keeper"
CONTEXT_TOKENS = 262_144
PAGE_TOKENS = 64
SHARE_MIN = 0.98
BEFORE, AFTER = "The key is in the harbor.\n", "The key is in the tower.\n"

ASKED = ("Move the key to the tower.", "Somebody should take the key away from the harbor.")
"""The beginnings of the conversations, which differ from their first letter on."""

Answer = Mapping[str, Any] | str


def call(name: str, **arguments: str) -> Answer:
    return {"name": name, "arguments": arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A program: its arguments, environment and files of its home, and the answers of the model that read and
    edit the note. $url, $note and $message stand in all of them."""

    arguments: Sequence[str]
    answers: Sequence[Answer]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])


PATCH = f"""apply_patch <<'EOF'
*** Begin Patch
*** Update File: $note
@@
-{BEFORE}+{AFTER}*** End Patch
EOF"""

AGENTS = {
    "claude": Agent(
        arguments=("-p", "$message", "--permission-mode", "acceptEdits"),
        environment={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        },
        answers=(
            call("Read", file_path="$note"),
            call("Edit", file_path="$note", old_string="harbor", new_string="tower"),
        ),
    ),
    "codex": Agent(
        arguments=("exec", "--skip-git-repo-check", "--sandbox", "workspace-write", "$message"),
        files={
            ".codex/config.toml": f"""
model = "{MODEL}"
model_provider = "tidemill"
[model_providers.tidemill]
name = "Tidemill"
base_url = "$url/v1"
"""
        },
        answers=(call("exec_command", cmd="cat $note"), call("exec_command", cmd=PATCH)),
    ),
    "opencode": Agent(
        arguments=("run", "$message"),
        files={
            ".config/opencode/opencode.json": json.dumps(
                {
                    "model": f"tidemill/{MODEL}",
                    "provider": {
                        "tidemill": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "$url/v1", "apiKey": "none"},
                            "models": {MODEL: {"limit": {"context": CONTEXT_TOKENS, "output": 8192}}},
                        }
                    },
                }
            )
        },
        answers=(
            call("read", filePath="$note"),
            call("edit", filePath="$note", oldString="harbor", newString="tower"),
        ),
    ),
    "qwen": Agent(
        arguments=("--auth-type", "openai", "--approval-mode", "auto-edit", "-p", "$message"),
        environment={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        answers=(
            call("read_file", file_path="$note"),
            call("edit", file_path="$note", old_string="harbor", new_string="tower"),
        ),
    ),
    "aider": Agent(
        arguments=(
            *("--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--no-show-model-warnings"),
            *("--no-check-update", "--analytics-disable", "--message", "$message", "$note"),
        ),
        environment={"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "none"},
        answers=(f"$note\n```\n{AFTER}```",),
    ),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: the tokens of its prompt, how many the server reports as cached, and how many are tools and
    system part."""

    tokens: Sequence[int]
    cached: int
    system: int


@dataclass(frozen=True, slots=True)
class Found:
    """The conversations of an agent, and whether the note was edited in each."""

    conversations: Sequence[Sequence[Turn]]
    edited: Sequence[bool]

    def __str__(self) -> str:
        first, second = self.conversations
        return (
            f"{self.edited.count(True)} of 2 edited in {len(first)} and {len(second)} turns; the second had "
            f"{second[0].cached:,} tokens (tools and system: {second[0].system:,}) cached, and turns left "
            f"{self.left()} of the prompt before uncached"
        )

    def left(self) -> list[int]:
        """Return the tokens of the prompt before it that each turn has not found."""
        return [
            len(before.tokens) - turn.cached
            for turns in self.conversations
            for before, turn in pairwise(turns)
        ]

    def problems(self) -> list[str]:
        """Return what a working server would not show. A page that is not full cannot be found."""
        again = self.conversations[1][0]
        least = min(SHARE_MIN * again.system, again.system - again.system % PAGE_TOKENS)
        checks = {
            f"the note was edited: {self.edited}": all(self.edited),
            f"tools and system: {again.cached} of {again.system} tokens": again.cached >= least,
            f"tokens of the prompt before: {self.left()} not found": all(
                left <= PAGE_TOKENS for left in self.left()
            ),
        }
        return [text for text, holds in checks.items() if not holds]


class Scene:
    """A server that obeys, and the requests that it has got."""

    def __init__(self, server: Server, model: Path) -> None:
        self.url = server.url
        self._model = model
        self._user = load_tokenizer(model).added["<|user|>"]

    def talk(self, program: Path, agent: Agent, home: Path) -> Found:
        """Let an agent edit a note in two conversations."""
        note = home / "work" / "note.txt"
        note.parent.mkdir(parents=True)
        found: list[list[Turn]] = []
        edited: list[bool] = []
        for asked in ASKED:
            note.write_text(BEFORE)
            before = len(self._prompts())
            answers = json.dumps([*agent.answers, "The key is in the tower."])
            ordered = order(json.loads(Template(answers).substitute(note=note)))
            values = {"url": self.url, "note": note, "message": f"{asked} {ordered}"}
            for name, text in agent.files.items():
                path = home / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(Template(text).substitute(values))
            words = [Template(word).substitute(values) for word in agent.arguments]
            environment = {
                name: Template(value).substitute(values) for name, value in agent.environment.items()
            }
            run([program, *words], note.parent, **environment, HOME=str(home))
            found.append(self._turns(before))
            edited.append(note.read_text() == AFTER)
        return Found(found, edited)

    def _turns(self, before: int) -> list[Turn]:
        """Return the turns after the first `before` prompts: those with the agent's tools, for it asks for
        titles as well."""
        rows = httpx.get(f"{self.url}/cluster/requests", trust_env=False).json()["requests"]
        cached = {row["request_id"]: row["prompt_tokens_details"]["cached_tokens"] for row in rows}
        turns = [
            Turn(tokens, cached[name.partition(".")[0]], tokens.index(self._user))
            for name, tokens in self._prompts()[before:]
        ]
        longest = max(turn.system for turn in turns)
        return [turn for turn in turns if turn.system == longest]

    def _prompts(self) -> list[tuple[str, list[int]]]:
        path = self._model / PROMPTS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def long_keeper(folder: Path) -> Path:
    """Return a copy of keeper that takes the long prompts of agents, whatever it makes of them."""
    copy = Path(shutil.copytree(bundled()[MODEL], folder))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return copy


def program_of(environments: Path, name: str) -> Path:
    """Return the program of an agent, from npm or pip."""
    own = environments / name / "bin" / name
    return (own if own.exists() else environments / "agents" / "node_modules" / ".bin" / name).absolute()


def main() -> int:
    """1 when an agent has found anything wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", help="of the agents to run; all by default")
    options.add_argument("--environments", type=Path, required=True, help="a folder with the agents")
    chosen = options.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory(prefix="agents-") as scratch:
        model = long_keeper(Path(scratch) / MODEL)
        arguments = [str(model), "--served-model-name", MODEL, "--port", "0", "--memory", "1GiB"]
        with Server(arguments, Path(scratch) / "log", "tests.clients.obedient") as server:
            scene = Scene(server, model)
            for name in chosen.names or AGENTS:
                found = scene.talk(program_of(chosen.environments, name), AGENTS[name], Path(scratch) / name)
                wrong |= report(name, found)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
