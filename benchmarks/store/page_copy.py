"""The cost of storing a prompt page-first and layer-first, and of copying between the two.

python -m benchmarks.store.page_copy --tokens 8192 --folder /dev/shm
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch

from tidemill.kernels.dispatch import page_copy
from tidemill.kernels.page_copy.planes import Direction, PageCopy, Plane
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import Attention, Layout, layout_of
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, PageStore, Put
from tidemill.workers.models.inputs import caches_of

PAGE_TOKENS = 64
LAYERS = (Attention(kv_heads=2, head_dim=256),) * 12  # of Qwen3-Next-80B
KV_HEADS, HEAD_DIM = LAYERS[0].kv_heads, LAYERS[0].head_dim

Objects = list[tuple[ObjectKey, memoryview]]


@dataclass(frozen=True)
class Side:
    """The cache of another engine for a prompt, and its views of keys and values by layer."""

    name: str
    memory: torch.Tensor
    views: list[torch.Tensor]


def sides(num_pages: int) -> list[Side]:
    """Return caches with token-major and head-major blocks, and with single tokens."""
    made: list[Side] = []
    for name, block_tokens in (("[block][token][head], 64", 64), ("[block][token][head], 16", 16)):
        blocks = num_pages * PAGE_TOKENS // block_tokens
        memory = torch.zeros(len(LAYERS), 2, blocks, block_tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        made.append(Side(name, memory, [kv.transpose(1, 2) for layer in memory for kv in layer]))
    memory = torch.zeros(len(LAYERS), 2, num_pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM, dtype=torch.bfloat16)
    made.append(Side("[block][head][token], 64", memory, [kv for layer in memory for kv in layer]))
    memory = torch.zeros(len(LAYERS), 2, num_pages * PAGE_TOKENS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    made.append(Side("[token][head]", memory, [kv[:, :, None] for layer in memory for kv in layer]))
    return made


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time: other processes use the machine too. Warms up first."""
    call()
    times: list[float] = []
    for _ in range(rounds):
        start_s = time.process_time()
        call()
        times.append(time.process_time() - start_s)
    return median(times)


@dataclass(frozen=True)
class Copied:
    """A copy in one direction: CPU seconds, and throughput relative to a plain copy."""

    cache: str
    direction: Direction
    copy_s: float
    of_memcpy: float


def measure_copies(
    copy: PageCopy, pages: torch.Tensor, layout: Layout, caches: Sequence[Side], rounds: int
) -> list[Copied]:
    rng, num_pages = Random(0), pages.numel() // layout.page_bytes
    page_N = torch.tensor(rng.sample(range(num_pages), num_pages), dtype=torch.int32)
    other = torch.zeros_like(pages)
    memcpy_s = seconds(lambda: other.copy_(pages), rounds)
    ours = [cache[:, :, kv] for cache in caches_of(layout, pages).plain_kv for kv in range(2)]
    found: list[Copied] = []
    for side in caches:
        planes = [Plane(page, view) for page, view in zip(ours, side.views, strict=True)]
        block_tokens = side.views[0].shape[2]
        blocks = rng.sample(range(len(side.views[0])), len(side.views[0]))
        slot_T = (torch.tensor(blocks)[:, None] * block_tokens + torch.arange(block_tokens)).flatten()
        directions: tuple[Direction, ...] = ("export", "import")
        for direction in directions:
            took_s = seconds(lambda d=direction, p=planes, s=slot_T: copy(p, page_N, s, d), rounds)
            found.append(Copied(side.name, direction, took_s, memcpy_s / took_s))
    return found


@dataclass(frozen=True)
class Stored:
    """The CPU seconds of one put and one get of all pages of the prompt."""

    store: str
    form: str
    objects: int
    object_bytes: int
    put_s: float
    get_s: float
    contains_s: float


def objects_of(memory: torch.Tensor, object_bytes: int, seed: int) -> Objects:
    view, rng = memory.view(-1).view(torch.uint8).numpy().data, Random(seed)
    return [
        (ObjectKey(Kind.PAGE, PageKey(rng.randbytes(16))), view[start : start + object_bytes])
        for start in range(0, view.nbytes, object_bytes)
    ]


async def measure_store(store: PageStore, name: str, form: str, objects: Objects, into: Objects) -> Stored:
    started_s = time.process_time()
    assert set(await store.put(objects)) == {Put.STORED}
    put_s = time.process_time()
    assert all(await store.contains([key for key, _ in objects]))
    asked_s = time.process_time()
    assert set(await store.get(into)) == {Got.HIT}
    got_s = time.process_time()
    await store.close()
    sizes = len(objects), objects[0][1].nbytes
    return Stored(name, form, *sizes, put_s - started_s, got_s - asked_s, asked_s - put_s)


def measure_stores(
    pages: torch.Tensor, layout: Layout, cache: torch.Tensor, folder: Path, rounds: int
) -> list[Stored]:
    """Return medians by store and form; both forms have the same bytes."""
    found: list[Stored] = []
    capacity_bytes = 2 * pages.numel()
    target = torch.zeros_like(pages)
    part_bytes = layout.page_bytes // len(LAYERS) // 2
    forms = (("page-first", pages, layout.page_bytes), ("layer-first", cache, part_bytes))
    for name in ("memory", "file"):
        for form, memory, object_bytes in forms:
            runs: list[Stored] = []
            for seed in range(rounds):
                objects = objects_of(memory, object_bytes, seed)
                views = objects_of(target, object_bytes, seed)
                with tempfile.TemporaryDirectory(dir=folder) as path:
                    store = (
                        MemoryStore(capacity_bytes)
                        if name == "memory"
                        else FileStore(Path(path), capacity_bytes)
                    )
                    runs.append(asyncio.run(measure_store(store, name, form, objects, views)))
            found.append(sorted(runs, key=lambda run: run.put_s + run.get_s)[rounds // 2])
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.page_copy")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt; whole pages of 64")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="folder of the file store")  # noqa: S108 - tmpfs is the point
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    layout = layout_of(LAYERS, PAGE_TOKENS, "bfloat16")
    pages = torch.zeros(options.tokens // PAGE_TOKENS * layout.page_bytes, dtype=torch.uint8)
    pages.random_(0, 256)
    caches = sides(options.tokens // PAGE_TOKENS)
    copied = measure_copies(page_copy("cpu", options.cache_dir), pages, layout, caches, options.rounds)
    stored = measure_stores(pages, layout, caches[0].memory, options.folder, options.rounds)
    if options.json:
        print(json.dumps([asdict(result) for result in (*copied, *stored)], indent=2))
        return 0
    print(f"{'cache':28}{'direction':12}{'CPU ms':>8}{'of memcpy':>12}")
    for copy in copied:
        print(f"{copy.cache:28}{copy.direction:12}{copy.copy_s * 1e3:8.1f}{copy.of_memcpy:12.2f}")
    print(
        f"\n{'store':8}{'form':14}{'objects':>8}{'KiB each':>10}{'put':>9}{'get':>9}{'contains, CPU ms':>18}"
    )
    for run in stored:
        times = f"{run.put_s * 1e3:9.1f}{run.get_s * 1e3:9.1f}{run.contains_s * 1e3:18.2f}"
        print(f"{run.store:8}{run.form:14}{run.objects:8}{run.object_bytes / 1024:10.0f}{times}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
