"""The server of `tidemill serve --detach` under test."""

import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx
import psutil

from tests.support.e2e.server import MARK, NO_TLS, READY, Serving, command_of, marked
from tidemill.cluster.processes.system.children import endpoint_pid
from tidemill.cluster.processes.system.private_folder import DetachedServer, detached_servers


class Detached(Serving):
    """The server of `tidemill serve --detach`; `folder` is that for temporary files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="det-"))
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Kill what a failed test has left."""
        del raised
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def serve(self, *options: str) -> str:
        """Start it; return what the command prints."""
        status, out, err = self.run("serve", "keeper", "--port", "0", *options, "--detach")
        assert status == 0, out + err
        assert out.startswith(READY)
        return out

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tidemill", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder), MARK: self._mark},
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.command(*arguments) as process:
            out, err = process.communicate()
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        return marked(self._mark)

    def parts(self, name: str) -> list[psutil.Process]:
        return [process for process in self.processes() if name in command_of(process)]

    def part(self, name: str) -> psutil.Process:
        (process,) = self.parts(name)
        return process

    @property
    def record(self) -> DetachedServer:
        (server,) = detached_servers(self.folder)
        return server

    @property
    def url(self) -> str:
        return self.record.url

    def endpoint(self) -> int:
        pid = endpoint_pid(Path(self.record.root))
        assert pid is not None
        return pid

    def serves(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health/ready", timeout=5, verify=NO_TLS).is_success
        return False

    def nothing_is_left(self) -> bool:
        return not self.processes() and not list(self.folder.iterdir())
