"""Start and stop of whole servers: the demo, and Ctrl-C. Other modules stop theirs by SIGTERM."""

import asyncio
import signal
from pathlib import Path
from random import Random

from tests.e2e.server import Server, run_cli
from tests.e2e.streams import run_all


def test_demo() -> None:
    ended, left = run_cli("demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers are right" in ended.stdout
    assert not left


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """One mixed worker serves the same tokens cold and warm; then it is stopped."""
    server = Server(["keeper", "--port", "0", "--mixed", "1", "--memory", "32MiB"], tmp_path / "log")
    try:
        prompt = [Random(1).randrange(5, 890) for _ in range(200)]
        body = {"model": "keeper", "prompt": prompt, "max_tokens": 30, "temperature": 0}
        cold, warm = (asyncio.run(run_all(server.url, [body]))[0] for _ in range(2))
        assert cold.outcome == warm.outcome
        assert warm.usage["prompt_tokens_details"]["cached_tokens"] == 192
        assert server.stop(signal.SIGINT) == 0
    finally:
        server.kill_everything()
