"""A start with a wrong model folder or template ends by itself, and SIGTERM ends any start at any moment.

What is wrong is named in one line. A template that is greedy for some chats harms no other client.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.support.cluster.fake_service import KEEPER
from tests.support.e2e.server import EVENTUALLY_S_MAX, MARK, NO_TLS, Server, marked, run_cli
from tests.unit.cluster.edge.chat.test_template_process import DOUBLED, LOOPS

pytestmark = pytest.mark.slow

CPU_S_MAX = 12.0
"""The CPU time of a start that fails, on one core: other tests run on this machine."""

OPTIONS = ("--port", "0", "--memory", "64MiB")
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim", "num_experts")
WRONG: tuple[object, ...] = (-1, 1e308, 1 << 63, 10**12, "x", [1], {"a": 1}, [[1]])
Damage = Callable[[Path], object]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 40)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def config_with(key: str, value: object) -> Damage:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def damages() -> Mapping[str, tuple[str, Damage]]:
    """Return files with their damage, by name: each kind at a file, and configs that are drawn."""
    rng = Random(52)
    kinds: dict[str, Damage] = {"pipe": pipe, "device": device, "endless": endless, "cut": cut}
    found = {
        f"{name}-{kind}": (name, damage) for kind, damage in kinds.items() for name in rng.sample(FILES, 1)
    }
    for key in rng.sample(SIZES, 2):
        value = rng.choice(WRONG)
        found[f"{key}-{value}"] = ("config.json", config_with(key, value))
    found["template that loops"] = ("chat_template.jinja", lambda path: path.write_text(LOOPS))
    return found


DAMAGES = damages()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEEPER, tmp_path / "model"))


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_folder_ends_soon_in_one_line(folder: Path, name: str) -> None:
    file, damage = DAMAGES[name]
    damage(folder / file)
    before = os.times()
    ended, left = run_cli("serve", str(folder), *OPTIONS)
    after = os.times()
    assert (ended.returncode, ended.stdout, left) == (2, "", []), ended.stderr
    [line] = ended.stderr.splitlines()
    assert line.startswith("tidemill: ")
    assert len(line) < 1000
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu_s < CPU_S_MAX


def test_mistake_found_in_a_worker_is_one_line_of_the_command(tmp_path: Path) -> None:
    """The compiler is looked for by the workers. Earlier mistakes: tests/unit/cluster/cli/test_main.py."""
    temp_folder = Path(tempfile.mkdtemp(prefix="run-"))  # a short path, for Ray's sockets
    nowhere = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(temp_folder)}
    ended, left = run_cli("serve", "keeper", "--port", "0", "--mixed", "1", **nowhere)
    assert (ended.returncode, ended.stdout, left) == (2, "", [])
    temp_folder.rmdir()  # and so it is empty
    [line] = [line for line in ended.stderr.splitlines() if " WARNING " not in line]
    assert line.startswith("tidemill: ")
    assert "g++" in line
    assert "--kernels reference" in line


def test_chat_that_makes_a_template_greedy_is_refused(folder: Path, tmp_path: Path) -> None:
    template = folder / "chat_template.jinja"
    for content, greedy in (("loop", LOOPS), ("double", DOUBLED)):
        greedily = f"{{% if messages[0].content == '{content}' %}}{greedy}{{% endif %}}"
        template.write_text(greedily + template.read_text())
    with (
        Server([str(folder), "--served-model-name", "m", *OPTIONS], tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS) as client,
    ):
        for content, status in (("loop", 400), ("hello", 200), ("double", 400), ("hello", 200)):
            body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == status, reply.text
            assert status == 200 or reply.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("delay_s", [0.5, 2.0, 4.5])
def test_signal_ends_a_start_at_any_moment(delay_s: float) -> None:
    """The moment in which Ray connects is hit in tests/e2e/test_launch.py."""
    mark, temp_folder = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="st-"))
    with subprocess.Popen(
        [sys.executable, "-m", "tidemill", "serve", "keeper", *OPTIONS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp_folder), MARK: mark},
    ) as process:
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=EVENTUALLY_S_MAX)
    assert process.returncode in {0, 130, -signal.SIGTERM}, stderr
    assert "Traceback" not in stderr
    assert "***" not in stderr
    assert not marked(mark)
    temp_folder.rmdir()
