"""Every command of the documentation runs against the shared server, or is listed here with a reason."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, eventually, run_cli
from tests.support.e2e.streams import completion
from tests.unit.tools.test_docs_site import PAGES, commands, shell_blocks

pytestmark = pytest.mark.slow

SERVED = "tidemill serve keeper --prefill 1 --decode 1"
HERE = "http://127.0.0.1:8000"

NOT_RUN = {
    r"tidemill serve .*--ray-address auto": "needs a Ray cluster: tests/e2e/test_nodes.py",
    r"tidemill serve .*mooncake": "needs Mooncake's master: tests/e2e/test_faults.py",
    r"tidemill serve MODEL": "starts a server of another model: tests/unit/cluster/config/test_flags.py",
    r"tidemill serve keeper .*(ssl|kv-events)": "starts another server: tests/e2e/test_edge.py",
    r"tidemill serve keeper": "starts another server of the kind that runs here",
    r"tidemill serve --config": "starts another server; its file is checked here",
    r"tidemill edge --join": "needs a running cluster at these addresses: tests/e2e/lifecycle",
    r"tidemill join-token": "needs certificates: tests/e2e/lifecycle/test_joined_edges.py",
    r"tidemill plan MODEL": "needs your model and cards: tests/unit/cluster/plan/test_command.py",
    r"tidemill status --watch": "runs until it is interrupted: tests/unit/cluster/cli/test_top.py",
}
"""The commands that start servers of their own or do not end, with the reason and what tests them. A command
matches from its start; the first row counts."""

SMALL = {
    "bench": ["--num-prompts", "4", "--gsp-num-groups", "2", "--gsp-prompts-per-group", "2"],
    "plan": ["--num-prompts", "20", "--max-cards", "2"],
    "simulate agents": ["--agents", "2", "--requests", "20"],
}
"""More arguments, so that an example ends soon."""

TRACE = [
    {"timestamp": 500 * index, "input_length": 900, "output_length": 20, "hash_ids": [0, index]}
    for index in range(8)
]
TALK = [{"conversations": [{"value": "Where is Emma?"}, {"value": "Emma is in the tower, I think."}]}] * 4
CLUSTER = "models:\n- model: keeper\n  groups:\n  - {role: mixed, memory: 64MiB}\n"


def documented() -> list[str]:
    """Return every `tidemill` command of all pages once."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page.read_text())))


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def curls(text: str) -> Iterator[str]:
    """Yield the calls of the local server, whose quotes may span lines."""
    for block in shell_blocks(text):
        call = ""
        for line in block.splitlines():
            if not call and not line.startswith(f"curl {HERE}"):
                continue
            call += f"{line}\n"
            try:
                shlex.split(call)
            except ValueError:  # a quote is open
                continue
            yield call.strip()
            call = ""


RUN = [command for command in documented() if command != SERVED and reason(command) is None]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with the files that examples name."""
    for name in ("trace.jsonl", "conversation_trace.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, TRACE)))
    (tmp_path / "conversations.json").write_text(json.dumps(TALK))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)


def words_of(command: str, server: Server, store: str) -> list[str]:
    """Return the arguments of an example, with this server and its store in the place of its names."""
    words = shlex.split(command)[1:]
    if words[0] in {"status", "memory", "bench"} and not {"--url", "--base-url"} & {*words}:
        words += ["--url", server.url]
    if words[0] == "store":
        words = [store if word == "URL" else word for word in words]
        words = [stored_key(server, store) if word == "KEY" else word for word in words]
    own = {"http://HOST:8000": server.url, "12GiB": "48MiB", "500": "5"}
    return [own.get(word, word) for word in words] + SMALL.get(words[0], SMALL.get(" ".join(words[:2]), []))


def stored_key(server: Server, store: str) -> str:
    """Return the key of an object in the store, which the pages of a long prompt make."""
    body = completion([5 + index % 700 for index in range(300)], 1)
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=EVENTUALLY_S_MAX).is_success
    found: list[str] = []

    def is_stored() -> bool:
        listed, _ = run_cli("store", "ls", "--store", store, "--json")
        found.extend(row["key"] for row in json.loads(listed.stdout))
        return bool(found)

    eventually(is_stored)
    return found[0]


def test_every_command_runs_or_has_a_reason() -> None:
    assert SERVED in documented()
    assert len(RUN) > 15
    unused = [
        pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in documented())
    ]
    assert not unused


@pytest.mark.parametrize("command", RUN)
@pytest.mark.usefixtures("files")
def test_command_runs(command: str, server: Server, folder: Path) -> None:
    ended, left = run_cli(*words_of(command, server, f"file://{folder / 'store'}"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not left


@pytest.mark.parametrize("call", dict.fromkeys(call for page in PAGES for call in curls(page.read_text())))
def test_call_is_answered(call: str, server: Server) -> None:
    words = [word.replace(HERE, server.url) for word in shlex.split(call)]
    ended = subprocess.run([*words, "--fail", "--silent"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    message = json.loads(ended.stdout)["choices"][0]["message"]
    assert message["content"] or message["tool_calls"]
