"""`tidemill store`: its options, and its actions on a store that workers share."""

# ruff: noqa: PLC0415 - stores are imported when a command runs

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar

from tidemill.cluster.cli.fleet import show
from tidemill.cluster.cli.options.arguments import UsageError, bytes_of
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.circuit_breaker import ABSENT
from tidemill.kvstore.stores.seal import PLAIN, Sealing
from tidemill.kvstore.stores.secret import is_public, read_secret

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tidemill.kvstore.stores.page_store import PageStore

_Result = TypeVar("_Result")

EXIT_NOT_THERE = 1


def add_store_commands(
    store: argparse.ArgumentParser, clock_s: Callable[[], float], new_rng: Callable[[], Random]
) -> None:
    """Add the actions of `tidemill store`."""
    runs: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _ls,
        "stat": lambda options: _stat(options, clock_s),
        "get": _get,
        "rm": _rm,
        "bench": lambda options: _bench(options, clock_s, new_rng()),
    }
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


def _ls(options: argparse.Namespace) -> int:
    from tidemill.cluster.cli.store import list_objects, objects_json, objects_table

    objects = _run_on_store(options, list_objects)
    show(options, objects_json(objects), objects_table(objects))
    return 0


def _stat(options: argparse.Namespace, clock_s: Callable[[], float]) -> int:
    from tidemill.cluster.cli.store import read_state, state_table

    state = _run_on_store(options, lambda store: read_state(store, clock_s))
    show(options, asdict(state), state_table(state))
    return 0 if state.is_reachable else EXIT_NOT_THERE


def _get(options: argparse.Namespace) -> int:
    from tidemill.cluster.cli.store import fetch
    from tidemill.kvstore.stores.page_store import Got

    [key] = _keys([options.key])
    outcome, body = _run_on_store(options, lambda store: fetch(store, key))
    if outcome is not Got.HIT:
        sys.stdout.write(f"{outcome.value}\n")
        return EXIT_NOT_THERE
    try:
        options.output.write_bytes(body)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from error
    sys.stdout.write(f"{outcome.value}: {len(body)} bytes in {options.output}\n")
    return 0


def _rm(options: argparse.Namespace) -> int:
    from tidemill.cluster.cli.store import remove

    keys = _keys(options.keys)
    removed = _run_on_store(options, lambda store: remove(store, keys))
    sys.stdout.write(f"{removed} of {len(keys)} removed\n")
    return 0 if removed == len(keys) else EXIT_NOT_THERE


def _bench(options: argparse.Namespace, clock_s: Callable[[], float], rng: Random) -> int:
    from tidemill.cluster.cli.store import Bench, measure, measurements_json, measurements_table

    batches = options.batches.split(",")
    if not all(batch.isdecimal() and int(batch) for batch in batches):
        raise UsageError(f"--batches {options.batches}: write them like 1,16,128")
    bench = Bench(
        sizes=tuple(bytes_of(size, "--sizes") for size in options.sizes.split(",")),
        batches=tuple(map(int, batches)),
        bytes_max=bytes_of(options.bytes, "--bytes"),
    )
    if not all(bench.sizes):
        raise UsageError(f"--sizes {options.sizes}: an object has at least one byte")
    measurements = _run_on_store(options, lambda store: measure(store, bench, rng, clock_s))
    show(options, measurements_json(measurements), measurements_table(measurements))
    return 0


def _run_on_store(
    options: argparse.Namespace, work: "Callable[[PageStore], Awaitable[_Result]]"
) -> "_Result":
    from tidemill.cluster.cli.store import with_store

    return with_store(options.store, sealing_of(options.store_secret_file), work)


def _keys(texts: Sequence[str]) -> list[ObjectKey]:
    try:
        return [ObjectKey.parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(
            f"{' '.join(texts)}: write keys as `tidemill store ls` shows them, like {ABSENT}"
        ) from error


def sealing_of(secret_file: Path | None) -> Sealing:
    if secret_file is None:
        return PLAIN
    sealing = Sealing(read_secret(secret_file))
    if is_public(secret_file):
        sys.stderr.write(f"tidemill: every user can read {secret_file}: chmod 600 {secret_file}\n")
    return sealing
