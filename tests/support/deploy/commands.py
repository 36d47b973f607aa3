"""What containers run, read by the programs that they run."""

import re
import shlex
from typing import Any

import pytest
from ray.scripts import scripts

from tests.support.deploy.chart import Document
from tidemill.cluster.cli.main import parser
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import mooncake_memory_owner as segment_owner
from tidemill.kvstore.stores.mooncake_store import Transport

Flags = dict[str, Any]


def lines_of(container: Document) -> list[list[str]]:
    """The commands of a container, in words: of a shell's script, each that starts one of our programs."""
    command: list[str] = container["command"]
    if "/bin/sh" not in command:
        return [command]
    text = "\n".join(container["args"]).replace("\\\n", " ")
    found = re.findall(
        r"(?:^|until )((?:exec )?(?:ray|tidemill|python|openssl) [^;|\n]*)", text, re.MULTILINE
    )
    return [shlex.split(line.removeprefix("exec ")) for line in found]


def ray_start(options: list[str]) -> Flags:
    """The options of `ray start`, as Ray's own command line reads them."""
    with scripts.start.make_context("start", list(options)) as context:
        return dict(context.params)


def start_options(group: Document) -> list[str]:
    """What KubeRay makes of the rayStartParams of a group."""
    return [f"--{name}={value}" for name, value in group["rayStartParams"].items()]


def tidemill(words: list[str]) -> Flags:
    """Ends the test when the parser refuses them."""
    try:
        return vars(parser().parse_args(words))
    except SystemExit:
        pytest.fail(f"tidemill does not take {words}")


def lends(words: list[str], patch: pytest.MonkeyPatch) -> tuple[str, int, str, Transport]:
    """The master, bytes, host and transport of a process that lends memory."""
    seen: list[tuple[str, int, str, Transport]] = []

    def lend(master: str, num_bytes: int, host: str, transport: Transport) -> None:
        seen.append((master, num_bytes, host, transport))
        raise StoreError("that is all")

    patch.setattr(segment_owner, "check_library", lambda: None)
    patch.setattr(segment_owner, "is_listening", bool)
    patch.setattr(segment_owner, "lend_memory", lend)
    patch.setattr(segment_owner.signal, "signal", print)  # it is not this process that shall end
    assert segment_owner.main(words) == 1
    return seen[0]
