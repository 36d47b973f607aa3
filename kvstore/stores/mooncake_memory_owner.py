"""Lends memory of this host to a Mooncake store, in a process that outlives workers.

It waits for the master at HOST:PORT and prints one line when the memory is lent. It ends with its
parent or on SIGTERM, and then withdraws the memory from the master. A soon restart lends empty
memory of the same name.
"""

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.mooncake_store import Transport, check_library, is_listening, lend_memory

POLL_S = 0.5
USAGE = (
    "python -m tidemill.kvstore.stores.mooncake_memory_owner HOST:PORT BYTES "
    "[--host=H] [--protocol=tcp] [--device=mlx5_0] [--ports=open]"
)
OPTIONS = {"--host", "--protocol", "--device", "--ports"}


def main(arguments: list[str]) -> int:
    """Lend memory until SIGTERM or the end of the parent; return the exit status."""
    master, size, *rest = [*arguments, "", ""]
    split = [option.partition("=") for option in rest if option]
    named = {name: value for name, _, value in split}
    if not size.isdecimal() or not named.keys() <= OPTIONS or not all(named.values()):
        print(f"usage: {USAGE}", file=sys.stderr)  # noqa: T201 - output of the command
        return 2
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _end)
    try:
        check_library()
        while not is_listening(master):
            _sleep_or_exit(parent)
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
        print(error, file=sys.stderr)  # noqa: T201 - for the parent
        return 1
    try:
        print(f"lent {size} bytes to the Mooncake store at {master}", flush=True)  # noqa: T201 - output of the command
        while True:
            _sleep_or_exit(parent)
    finally:
        take_back()


def _end(_: int, __: FrameType | None) -> NoReturn:
    sys.exit(0)


def _sleep_or_exit(parent: int) -> None:
    """Sleep for `POLL_S`, or exit if `parent` has ended."""
    if os.getppid() != parent:
        sys.exit(0)
    time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
