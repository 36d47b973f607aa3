"""Lends memory of this host to a Mooncake store, in a process of its own, so that it outlives workers.

It waits for the master at HOST:PORT, prints one line when the memory is lent, and ends with its parent or on
SIGTERM; the master is told. Whoever starts it again soon gives the store empty memory of the same name.
"""

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.mooncake_store import Transport, check_library, is_there, lend_memory

LOOK_S = 0.5
USAGE = (
    "python -m tidemill.kvstore.stores.mooncake_memory_owner HOST:PORT BYTES "
    "[--host=H] [--protocol=tcp] [--device=mlx5_0] [--ports=open]"
)
OPTIONS = {"--host", "--protocol", "--device", "--ports"}


def main(arguments: list[str]) -> int:
    """Lends until it is told to end; the exit status."""
    master, size, *rest = [*arguments, "", ""]
    split = [option.partition("=") for option in rest if option]
    named = {name: value for name, _, value in split}
    if not size.isdecimal() or not named.keys() <= OPTIONS or not all(named.values()):
        print(f"usage: {USAGE}", file=sys.stderr)  # noqa: T201 - the answer
        return 2
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _end)
    try:
        check_library()
        while not is_there(master):
            _sleep_under(parent)
        take_back = lend_memory(
            master,
            int(size),
            named.get("--host", ""),
            Transport(
                named.get("--protocol", "tcp"),
                named.get("--device", ""),
                is_open=named.get("--ports") == "open",
            ),
        )
    except StoreError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for whoever started it
        return 1
    try:
        print(f"lent {size} bytes to the Mooncake store at {master}", flush=True)  # noqa: T201 - the answer
        while True:
            _sleep_under(parent)
    finally:
        take_back()


def _end(_: int, __: FrameType | None) -> NoReturn:
    sys.exit(0)


def _sleep_under(parent: int) -> None:
    """A while; ends this process when `parent` is its parent no more."""
    if os.getppid() != parent:
        sys.exit(0)
    time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
