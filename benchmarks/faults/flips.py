"""Bits that flip in what a store holds: each is found, and no answer is made of it."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

from tests.support.e2e.faults import MASTER, OWNER, process_of, run
from tests.support.e2e.history import asks, broken
from tests.support.e2e.server import Server
from tests.support.mooncake import mooncake

from benchmarks.faults.scene import serving
from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import layout_of
from tidemill.kvstore.stores.open_store import open_store
from tidemill.kvstore.stores.page_store import DAMAGED, Got, PageStore
from tidemill.kvstore.stores.seal import SEAL_BYTES
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.sources.names import bundled

BATCH = 40
UNTOUCHED = 8
"""Objects of a batch that stay as they are, and must be found so."""

NAMES_MAX = 100  # of one question to a master, which is a line of HTTP
TIMEOUT = "timeout=30s"  # what is late on a busy machine is not what is looked for

Flip = Callable[[Mapping[ObjectKey, int]], None]
"""Flips one bit of each object, counted from the beginning of its seal."""


def in_files(folder: Path) -> Flip:
    def flip(bits: Mapping[ObjectKey, int]) -> None:
        for key, bit in bits.items():
            (path,) = folder.rglob(str(key))
            with path.open("r+b", buffering=0) as file:
                _flip(file, 0, bit)

    return flip


def in_memory(admin: str, pid: Callable[[], int]) -> Flip:
    """Return a flip in the memory of a Mooncake owner, at the address that the master reports."""

    def flip(bits: Mapping[ObjectKey, int]) -> None:
        places = places_of(admin, [str(key) for key in bits])
        with Path(f"/proc/{pid()}/mem").open("r+b", buffering=0) as memory:
            for key, bit in bits.items():
                memory.seek(places[str(key)][0])
                assert memory.read(3) == b"TMO", "no seal is there"
                _flip(memory, places[str(key)][0], bit)

    return flip


def _flip(file: Any, start: int, bit: int) -> None:  # noqa: ANN401 - a file without a buffer
    file.seek(start + bit // 8)
    (byte,) = file.read(1)
    file.seek(start + bit // 8)
    file.write(bytes([byte ^ 1 << bit % 8]))


def places_of(admin: str, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return each object's offset in its owner's memory and its size."""
    places: dict[str, tuple[int, int]] = {}
    for start in range(0, len(names), NAMES_MAX):
        asked = ",".join(names[start : start + NAMES_MAX])
        with urlopen(f"http://{admin}/batch_query_keys?keys={asked}") as answer:
            found = json.loads(answer.read())["data"]
        for name, process in found.items():
            if process["values"]:
                places[name] = (process["values"][0]["buffer_address_"], process["values"][0]["size_"])
    return places


async def count_flips(store: PageStore, flip: Flip, count: int, rng: Random) -> dict[str, Any]:
    """Pages and checkpoints of the bundled model's size: stored, damaged, fetched."""
    layers, _ = describe(bundled()["keeper"], 1)
    layout = layout_of(layers, 64, "float32")
    sizes = {Kind.PAGE: layout.page_bytes, Kind.CHECKPOINT: layout.state_bytes}
    found: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong = untouched = hits = 0
    while sum(found.values()) < count:
        damaged = min(BATCH, count - sum(found.values()))
        bodies: dict[ObjectKey, bytes] = {}
        for index in range(damaged + UNTOUCHED):
            kind = (Kind.PAGE, Kind.CHECKPOINT)[index % 2]
            bodies[ObjectKey(kind, PageKey(rng.randbytes(DIGEST_BYTES)))] = rng.randbytes(sizes[kind])
        outcomes = await store.put([(key, memoryview(body)) for key, body in bodies.items()])
        assert all(outcome.is_there for outcome in outcomes), outcomes
        keys = list(bodies)
        await asyncio.to_thread(
            flip, {key: rng.randrange(8 * (SEAL_BYTES + sizes[key.kind])) for key in keys[:damaged]}
        )
        views = [(key, memoryview(bytearray(sizes[key.kind]))) for key in keys]
        for index, ((key, view), got) in enumerate(zip(views, await store.get(views), strict=True)):
            wrong += got is Got.HIT and bytes(view) != bodies[key]
            if index < damaged:
                found[got.value] += 1
                kinds[key.kind.name.lower()] += got in DAMAGED
            else:
                untouched += 1
                hits += got is Got.HIT
        again = await store.get(views[:damaged])
        assert set(again) == {Got.MISS}, "what is damaged is deleted"
        await store.remove(keys)
    detected = sum(found[got.value] for got in DAMAGED)
    return {
        "flips": count,
        "detected": detected,
        "as": dict(found),
        "kinds": dict(kinds),
        "wrong_bytes": wrong,
        "untouched": untouched,
        "untouched_hits": hits,
    }


def stored_objects(count: int) -> dict[str, Any]:
    """A store alone, with as many flips in files, and in the memory of a Mooncake owner."""
    rows: dict[str, Any] = {}

    async def main(url: str, flip: Flip) -> dict[str, Any]:
        store = open_store(url)
        try:
            return await count_flips(store, flip, count, Random(4))
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows["files"] = asyncio.run(main(f"file://{folder}/store?size=1GiB&{TIMEOUT}", in_files(folder)))
        with mooncake(folder / "log") as service:
            url = f"mooncake://{service.address}?admin={service.admin}&{TIMEOUT}"
            flip = in_memory(service.admin, lambda: service.owners[-1].pid)
            rows["owner's memory"] = asyncio.run(main(url, flip))
    return rows


def served_answers(num_asks: int) -> dict[str, Any]:
    """A bit of every object that a server has stored flips, then all caches are lost."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        with serving(
            ["--prefill", "1", "--decode", "1", "--store", f"file://{folder}/store?size=1GiB&{TIMEOUT}"], log
        ) as server:

            def flip_files() -> int:
                files = [path for path in (folder / "store").rglob("*.[pcw]") if path.is_file()]
                in_files(folder)(_anywhere({path.name: path.stat().st_size for path in files}))
                return len(files)

            rows["files"] = _answers(server, flip_files, num_asks)
        with serving(
            ["--prefill", "1", "--decode", "1", "--store", f"mooncake?size=256MiB&{TIMEOUT}"], log
        ) as server:
            rows["owner's memory"] = _answers(server, lambda: flip_all(server), num_asks)
    return rows


def flip_all(server: Server) -> int:
    """A bit of every object that the owner of a server's Mooncake holds."""
    options = dict(
        word.removeprefix("--").split("=") for word in process_of(server, MASTER).cmdline() if "=" in word
    )
    admin, pid = f"{options['metrics_host']}:{options['metrics_port']}", process_of(server, OWNER).pid
    with urlopen(f"http://{admin}/get_all_keys") as answer:
        places = places_of(admin, answer.read().decode().split())
    in_memory(admin, lambda: pid)(_anywhere({name: size for name, (_, size) in places.items()}))
    return len(places)


def _anywhere(sizes: Mapping[str, int]) -> dict[ObjectKey, int]:
    rng = Random(5)
    return {ObjectKey.parse(name): rng.randrange(8 * size) for name, size in sizes.items()}


def _answers(server: Server, flip: Callable[[], int], num_asks: int) -> dict[str, Any]:
    wanted = asks(Random(3), num_asks, num_tokens=400, max_tokens=60)
    calm = asyncio.run(run(server, wanted, "flips", width=4)).calls
    flipped = flip()
    server.replace_workers()
    calls = asyncio.run(run(server, wanted, "flips", width=4)).calls
    damaged = [f"store_gets_as_{got.value}" for got in DAMAGED]
    changed = [one for pair in zip(calls, calm, strict=True) if (one := broken(*pair))]
    return {
        "objects_flipped": flipped,
        "found_when_fetched": int(sum(server.counter(name) for name in damaged)),
        "fetched_unharmed": int(server.counter("store_gets_as_hit")),
        "answers": len(calls),
        "changed": len(changed),
        "trouble": changed[:3],
    }


def flips(count: int) -> dict[str, Any]:
    return {"stored objects": stored_objects(count), "served answers": served_answers(16)}
