"""`tidemill serve FILE.gguf`: a trained model, its own tokenizer and template, over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.server import Server, run_cli
from tests.support.waits import EVENTUALLY_S_MAX
from tests.support.workers.smollm2 import smollm2_file

FILE = smollm2_file()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("gguf")
    folder = str(scratch / "cache")
    arguments = [str(FILE), "--port", "0", "--served-model-name", "smollm2", "--download-dir", folder]
    with Server([*arguments, "--max-model-len", "1024"], scratch / "log") as server:
        yield server


def test_chat_has_real_words(server: Server) -> None:
    question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": 40}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=EVENTUALLY_S_MAX)
    (choice,) = reply.json()["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_file_is_checked_without_a_server(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"models: [{{model: {FILE}, download_dir: {tmp_path}}}]")
    ended, left = run_cli("config", "check", str(config))
    assert (ended.returncode, left) == (0, []), ended.stderr
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(FILE.read_bytes()[: 1 << 24])
    config.write_text(f"models: [{{model: {cut}, download_dir: {tmp_path}}}]")
    ended, _ = run_cli("config", "check", str(config))
    assert ended.returncode == 2
    assert "ends behind the end of the file" in ended.stderr + ended.stdout
