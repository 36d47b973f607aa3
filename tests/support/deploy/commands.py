"""The commands of containers, parsed by the programs that they run."""

import re
import shlex
from typing import Any

import pytest
from ray.scripts import scripts

from tests.support.deploy.chart import Document
from tidemill.cluster.cli.main import parser
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import mooncake_memory_owner
from tidemill.kvstore.stores.mooncake_store import Transport

Flags = dict[str, Any]


def lines_of(container: Document) -> list[list[str]]:
    """Return the commands of a container as words; of a shell script, those that start our programs."""
    command: list[str] = container["command"]
    if "/bin/sh" not in command:
        return [command]
    text = "\n".join(container["args"]).replace("\\\n", " ")
    lines = re.findall(
        r"(?:^|until )((?:exec )?(?:ray|tidemill|python|openssl) [^;|\n]*)", text, re.MULTILINE
    )
    return [shlex.split(line.removeprefix("exec ")) for line in lines]


def ray_start(options: list[str]) -> Flags:
    """Return the options of `ray start` as Ray's command line parses them."""
    with scripts.start.make_context("start", list(options)) as context:
        return dict(context.params)


def start_options(group: Document) -> list[str]:
    """Return the options that KubeRay derives from the rayStartParams of a group."""
    return [f"--{name}={value}" for name, value in group["rayStartParams"].items()]


def tidemill(words: list[str]) -> Flags:
    """Parse the words; fail the test when the parser refuses them."""
    try:
        return vars(parser().parse_args(words))
    except SystemExit:
        pytest.fail(f"tidemill refuses {words}")


def lends(words: list[str], patch: pytest.MonkeyPatch) -> tuple[str, int, str, Transport]:
    """Return the master, bytes, host and transport of a process that lends memory."""
    calls: list[tuple[str, int, str, Transport]] = []

    def lend(master: str, num_bytes: int, host: str, transport: Transport) -> None:
        calls.append((master, num_bytes, host, transport))
        raise StoreError("stop here")

    patch.setattr(mooncake_memory_owner, "check_library", lambda: None)
    patch.setattr(mooncake_memory_owner, "is_listening", bool)
    patch.setattr(mooncake_memory_owner, "lend_memory", lend)
    patch.setattr(mooncake_memory_owner.signal, "signal", print)  # keep the signals of this process
    assert mooncake_memory_owner.main(words) == 1
    return calls[0]
