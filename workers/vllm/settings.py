"""The settings of a worker whose engine is vLLM, and the command that starts its server. Pure."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic.dataclasses import dataclass as checked_dataclass

from tidemill.workers.settings import HostedSettings, SettingsError

VERSION_MIN = (0, 32)
"""The first version with the endpoint that takes and returns tokens."""

LOGPROBS_MAX = 21
"""One more than clients may ask for: vLLM counts the drawn token, where it is none of the likeliest."""

OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
"""The variables that are about the Python of the worker."""


@checked_dataclass(frozen=True, kw_only=True)
class VllmSettings(HostedSettings):
    """A server of its own, which `python` runs with the arguments `args`, or one of `urls`, which others
    run: the worker `mixed-1` has the second one."""

    python: Path
    ranks: int = 1  # of each server, which starts them itself
    args: str = ""
    urls: tuple[str, ...] = ()
    url: str = ""  # of the server that this worker joins; empty: it starts one

    def __post_init__(self) -> None:
        """Raises SettingsError."""
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise SettingsError(f"--engine-args {self.args!r}: {error}") from None

    def of_worker(self, name: str) -> Self:
        if not self.urls:
            return self
        index = int(name.rpartition("-")[2])
        if index >= len(self.urls):
            raise SettingsError(f"--engine has {len(self.urls)} URLs, and {name} has none: add one")
        return replace(self, url=self.urls[index])


SWITCHES = ("--enable-scale-out", "--enable-prefix-caching", "--disable-uvicorn-access-log")


def command_of(settings: VllmSettings, port: int, events_port: int) -> list[str]:
    """Return the command of a server at `port`, which sends KV events to `events_port`. Those of two equal
    arguments the later one counts, so the operator's come last."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{events_port}",
    }
    options: dict[str, object] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--scheduling-policy": "priority",
        "--structured-outputs-config": json.dumps({"backend": "guidance"}),
        "--kv-events-config": json.dumps(events),
        "--max-logprobs": LOGPROBS_MAX,
        "--tensor-parallel-size": settings.ranks,
        "--max-model-len": settings.max_model_len,
        "--kv-cache-memory-bytes": settings.memory_bytes,
    }
    command = [str(settings.python), "-m", "vllm.entrypoints.cli.main", "serve", str(settings.model_folder)]
    for name, value in options.items():
        command += [] if value is None else [name, str(value)]
    return [*command, *SWITCHES, *shlex.split(settings.args)]


def environ_of(settings: VllmSettings, api_key: str) -> dict[str, str | None]:
    """Return the changes of a worker's environment for its server; None unsets. The threads are of CPUs."""
    changes: dict[str, str | None] = dict.fromkeys(OF_OUR_PYTHON)
    if not settings.on_cuda:
        changes |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return changes | {"VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": api_key}
