"""Parse arguments of the command, and refuse wrong ones."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes


class UsageError(TidemillError):
    """A wrong argument, or arguments that exclude each other."""


def bytes_of(size: str, option: str) -> int:
    """Parse a size like `8GiB`. Raises UsageError that names `option`."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error


def add_store_commands(
    store: argparse.ArgumentParser, runs: Mapping[str, Callable[[argparse.Namespace], int]]
) -> None:
    """Add the actions of `tidemill store`; `runs` has the function of each."""
    actions = store.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the objects of the store, the least recently used last")
    stat = actions.add_parser("stat", help="show whether the store answers, and its contents")
    get = actions.add_parser("get", help="verify an object and write its body to a file")
    get.add_argument("key", metavar="KEY", help="a key as `tidemill store ls` shows it")
    get.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    rm = actions.add_parser("rm", help="remove objects from the store")
    rm.add_argument("keys", metavar="KEY", nargs="+", help="keys as `tidemill store ls` shows them")
    bench = actions.add_parser("bench", help="measure the store with temporary objects")
    bench.add_argument(
        "--sizes", default="64KiB,1536KiB,75MiB", metavar="SIZES", help="object sizes (%(default)s)"
    )
    bench.add_argument(
        "--batches", default="1,16,128", metavar="NUMBERS", help="objects per call (%(default)s)"
    )
    bench.add_argument(
        "--bytes", default="256MiB", metavar="SIZE", help="maximum bytes that a line moves (%(default)s)"
    )
    for name, action in actions.choices.items():
        action.add_argument(
            "--store", required=True, metavar="URL", help="the URL that `tidemill serve` prints"
        )
        action.add_argument(
            "--store-secret-file", type=Path, metavar="PATH", help="the secret file of `tidemill serve`"
        )
        action.set_defaults(run=runs[name])
    for action in (ls, stat, bench):
        action.add_argument("--json", action="store_true", help="print JSON")
