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

WEDGED_S_MAX, WEDGED_CUDA_S_MAX = 120.0, 30.0
"""The longest time of a step: on CPUs one of thousands of prompt tokens takes a minute."""

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
    transfers: bool = False  # its server and those of other workers pull blocks from each other, over NIXL
    host: str = "127.0.0.1"  # where they reach it

    def __post_init__(self) -> None:
        """Raises SettingsError."""
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise SettingsError(f"--engine-args {self.args!r}: {error}") from None

    @property
    def wedged_s_max(self) -> float:
        return WEDGED_CUDA_S_MAX if self.on_cuda else WEDGED_S_MAX

    def of_worker(self, name: str, host: str = "127.0.0.1") -> Self:
        if not self.urls:
            return replace(self, host=host)
        index = int(name.rpartition("-")[2])
        if index >= len(self.urls):
            raise SettingsError(f"--engine has {len(self.urls)} URLs, and {name} has none: add one")
        return replace(self, url=self.urls[index])


def transfer_config(settings: VllmSettings) -> dict[str, object]:
    """Return what lets a server give blocks and pull blocks, so that its role may change. It keeps those of a
    prompt until they are pulled. The server that waits for them renews their lease between its steps, so the
    lease is longer than those: blocks that are given away too early would be pulled with other contents."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": int(2 * settings.wedged_s_max)},
    }


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
    if settings.transfers:
        options["--kv-transfer-config"] = json.dumps(transfer_config(settings))
    command = [str(settings.python), "-m", "vllm.entrypoints.cli.main", "serve", str(settings.model_folder)]
    for name, value in options.items():
        command += [] if value is None else [name, str(value)]
    return [*command, *SWITCHES, *shlex.split(settings.args)]


def environ_of(settings: VllmSettings, api_key: str, transfer_port: int = 0) -> dict[str, str | None]:
    """Return the changes of a worker's environment for its server; None unsets. The threads are of CPUs.
    Other servers ask at `transfer_port` of the host before they pull blocks."""
    changes: dict[str, str | None] = dict.fromkeys(OF_OUR_PYTHON)
    if not settings.on_cuda:
        changes |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if settings.transfers:
        changes |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(transfer_port),
        }
    return changes | {"VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": api_key}
