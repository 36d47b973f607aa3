"""This end of the pipes to `vllm_peer.py`, which runs in the peer's own virtual environment."""

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("vllm_peer.py")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all in one process, whose CPU time is that of the whole
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


class PeerFailed(Exception):
    """The peer could not do it; the message is its own."""


class Peer:
    """One process of vLLM. `versions` are its own and its torch's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._answer()

    def seconds(self, **order: object) -> float:
        """CPU seconds of what was ordered. Raises PeerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"the peer ended with status {self._process.wait()}")
        return json.loads(line)


@contextmanager
def vllm_peer(python: Path | None) -> Generator[Peer | None]:
    """Its process for as long as the block lasts; None without a `python` to run it."""
    if python is None:
        yield None
        return
    command = [
        "env",
        *(f"{name}={value}" for name, value in SETTINGS.items()),
        str(python),
        "-P",
        str(SCRIPT),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own script
        try:
            yield Peer(process)
        finally:
            process.terminate()
