"""The `tidemill` command: the only place that reads arguments, the environment and the clock.

Commands import what they need when they run: `tidemill status` must not wait for Ray and torch, and Ray reads
its environment when it is imported.
"""

# ruff: noqa: PLC0415 - see above

import argparse
import asyncio
import os
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console

from tidemill import __version__
from tidemill.cluster.settings import ClusterSettings, RouterSettings, WorkerSettings, ray_environ
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.models.bundled import bundled
from tidemill.workers.settings import EngineSettings

if TYPE_CHECKING:
    from tidemill.cluster.serving import Work

EXIT_WRONG_ANSWER = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

STORE_FOLDERS = (Path("/dev/shm"),)  # noqa: S108 - where a private folder is made, when there is no --store


class UsageError(TidemillError):
    """Options that do not go together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done, 1: the demo had a wrong answer, 2: refused, with one line that names the
    fix."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return options.run(options)
    except TidemillError as error:
        sys.stderr.write(f"tidemill: {error}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM unwinds like SIGINT: whatever was started is stopped on the way out."""
    del number, frame
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="tidemill", description="A serving cluster for hybrid language models, on Ray."
    )
    command.add_argument("--version", action="version", version=f"tidemill {__version__}")
    commands = command.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP")
    serve.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a bundled model: keeper")
    add_serving_options(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="serve the bundled model, ask it questions, check the answers")
    demo.set_defaults(run=_demo)

    models = commands.add_parser("models", help="list the bundled models with the path of their folder")
    models.set_defaults(run=_models)

    status = commands.add_parser("status", help="show the workers of a running server")
    _add_reading_options(status)
    status.set_defaults(run=_status)

    memory = commands.add_parser(
        "memory", help="show the memory of a running server's workers, or give one of them another budget"
    )
    _add_reading_options(memory)
    memory.add_argument("--worker", metavar="NAME", help="whose budget to set")
    memory.add_argument(
        "--budget", metavar="SIZE", help="what it may take from now on; auto leaves it to the broker"
    )
    memory.set_defaults(run=_memory)
    return command


def _add_reading_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    command.add_argument("--json", action="store_true", help="as JSON")


def add_serving_options(serve: argparse.ArgumentParser) -> None:
    edge = serve.add_argument_group("endpoint")
    _add(edge.add_argument, "--host", "127.0.0.1", "address to listen on")
    _add(edge.add_argument, "--port", 8000, "0 takes a free one")
    edge.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    edge.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="limit of prompt and output together"
    )

    workers = serve.add_argument_group("workers")
    workers.add_argument("--prefill", type=int, metavar="N", help="workers that compute prompts (1)")
    workers.add_argument("--decode", type=int, metavar="N", help="workers that generate (1)")
    workers.add_argument("--mixed", type=int, metavar="N", help="workers that do both, instead of these two")
    workers.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="processes that a worker consists of: its ranks, on one node (%(default)s)",
    )
    for role in ("prefill", "decode"):
        workers.add_argument(
            f"--{role}-tensor-parallel-size", type=int, metavar="N", help=f"the same, of {role} workers alone"
        )
    _add(workers.add_argument, "--page-size", 64, "tokens in a page", metavar="TOKENS")
    _add(workers.add_argument, "--kv-cache-dtype", "float32", "of pages", choices=["float32", "bfloat16"])
    _add(workers.add_argument, "--max-num-seqs", 64, "rows of a step", metavar="N")
    _add(workers.add_argument, "--max-num-batched-tokens", 512, "token budget of a step", metavar="N")
    _add(
        workers.add_argument,
        "--num-speculative-tokens",
        0,
        "tokens of a row that are guessed from its text and verified; the answers stay the same",
        metavar="N",
    )
    workers.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch the next step before the tokens of this one are read",
    )
    _add(workers.add_argument, "--threads", 1, "CPU threads of each rank", metavar="N")
    _add(workers.add_argument, "--kernels", "cpu", "operator variants", choices=["cpu", "reference"])

    _add_memory_options(serve)

    cluster = serve.add_argument_group("cluster")
    cluster.add_argument(
        "--store",
        metavar="URL",
        help="where workers exchange pages: file:///path?size=8GiB (a folder of its own, removed at the end)",
    )
    cluster.add_argument("--ray-address", metavar="ADDRESS", help="join this Ray cluster; without, start one")


def _add_memory_options(serve: argparse.ArgumentParser) -> None:
    memory = serve.add_argument_group("memory")
    _add(memory.add_argument, "--memory", "1GiB", "each worker's share, for pages and states", metavar="SIZE")
    memory.add_argument(
        "--memory-floor",
        metavar="SIZE",
        help="a worker never has less (what one request of --max-model-len needs)",
    )
    memory.add_argument(
        "--memory-broker",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="workers of one device lend each other what they do not need; without, each keeps its share",
    )
    _add(
        memory.add_argument,
        "--checkpoint-strategy",
        "lazy",
        "while generating: none, two more states per row, or one more at a checkpoint only",
        choices=["none", "double", "lazy"],
    )
    memory.add_argument(
        "--checkpoint-interval",
        type=int,
        metavar="TOKENS",
        help="between checkpoints while generating, a multiple of the page size (the page size)",
    )
    _add(
        memory.add_argument,
        "--checkpoints-per-path",
        16,
        "kept at most on the way to one prefix",
        metavar="N",
    )
    _add(
        memory.add_argument,
        "--eviction-policy",
        "value",
        "what goes first: used least recently, or least compute saved per byte",
        choices=["lru", "value"],
    )


def _add(
    add_argument: Callable[..., object], name: str, default: str | int, text: str, **more: object
) -> None:
    add_argument(name, default=default, type=type(default), help=f"{text} (%(default)s)", **more)


def _serve(options: argparse.Namespace) -> int:
    counts = " + ".join(f"{count} {role}" for role, count in _worker_counts(options).items())

    async def work(url: str) -> None:
        sys.stdout.write(f"ready: {url}/v1 serves {_model_name(options)} with {counts}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    _run(options, work)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from tidemill.cluster.demo import run_demo

    del options
    served = parser().parse_args(["serve", "keeper", "--port", "0", "--memory", "64MiB"])
    is_right = False

    async def work(url: str) -> None:
        nonlocal is_right
        is_right = await run_demo(url, "keeper", bundled()["keeper"], Console())

    _run(served, work)
    return 0 if is_right else EXIT_WRONG_ANSWER


def _models(options: argparse.Namespace) -> int:
    del options
    for name, folder in bundled().items():
        sys.stdout.write(f"{name}\t{folder}\n")
    return 0


def _status(options: argparse.Namespace) -> int:
    from tidemill.cluster.status import as_json, fetch_status, render

    status = fetch_status(options.url)
    if options.json:
        sys.stdout.write(as_json(status) + "\n")
    else:
        Console().print(render(status))
    return 0


def _memory(options: argparse.Namespace) -> int:
    from tidemill.cluster.memory import fetch_memory, render_memory, set_budget
    from tidemill.cluster.status import as_json

    if (options.worker is None) != (options.budget is None):
        raise UsageError("--worker and --budget go together: name a worker and what it shall have")
    if options.worker is None:
        memory = fetch_memory(options.url)
    else:
        budget = None if options.budget == "auto" else str(_bytes_of(options.budget, "--budget"))
        memory = set_budget(options.url, options.worker, budget)
    if options.json:
        sys.stdout.write(as_json(memory) + "\n")
    else:
        Console().print(render_memory(memory))
    return 0


def _bytes_of(size: str, option: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error


def _run(options: argparse.Namespace, work: "Work") -> None:
    """Serve as `options` say while `work` runs. Ray's environment is set before anything imports Ray."""
    os.environ.update(ray_environ(joins=options.ray_address is not None, token=secrets.token_hex(32)))
    from tidemill.cluster.http.app import Sources
    from tidemill.cluster.serving import Endpoint, serve, shared_store

    endpoint = Endpoint(
        host=options.host,
        port=options.port,
        model_name=_model_name(options),
        model_folder=_model_folder(options),
    )
    sources = Sources(
        clock_s=time.monotonic,
        unix_time_s=time.time,
        new_id=lambda: uuid.uuid4().hex,
        rng=Random(secrets.randbits(64)),  # noqa: S311 - seeds of draws are no secrets
    )
    with shared_store(options.store, STORE_FOLDERS) as store_url:
        serve(endpoint, _cluster_settings(options, store_url), sources, Console(stderr=True), work)


def _cluster_settings(options: argparse.Namespace, store_url: str) -> ClusterSettings:
    counts = _worker_counts(options)
    sizes = _tensor_parallel_sizes(options, counts)
    memory_bytes = _bytes_of(options.memory, "--memory")
    floor = options.memory_floor
    engine = EngineSettings(
        model_folder=_model_folder(options),
        memory_bytes=memory_bytes,
        memory_max_bytes=memory_bytes * (sum(counts.values()) if options.memory_broker else 2),
        memory_floor_bytes=None if floor is None else _bytes_of(floor, "--memory-floor"),
        starts_at_floor=options.memory_broker,
        eviction=options.eviction_policy,
        checkpoints_per_path=options.checkpoints_per_path,
        checkpoint_strategy=options.checkpoint_strategy,
        checkpoint_interval=options.checkpoint_interval,
        store_url=store_url,
        cache_folder=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill",
        page_tokens=options.page_size,
        kv_dtype=options.kv_cache_dtype,
        kernels=options.kernels,
        threads=options.threads,
        step_tokens_max=options.max_num_batched_tokens,
        rows_max=options.max_num_seqs,
        max_model_len=options.max_model_len,
        overlap=options.overlap,
        drafts_max=options.num_speculative_tokens,
        tensor_parallel_sizes=tuple(sorted(set(sizes.values()))),
    )
    workers = [
        WorkerSettings(
            name=f"{role}-{index}", role=role, engine=replace(engine, tensor_parallel_size=sizes[role])
        )
        for role, count in counts.items()
        for index in range(count)
    ]
    expected = frozenset(worker.name for worker in workers)
    return ClusterSettings(
        workers=tuple(workers),
        router=RouterSettings(broker=options.memory_broker, expected=expected),
        ray_address=options.ray_address,
    )


def _worker_counts(options: argparse.Namespace) -> dict[Role, int]:
    if options.mixed is not None:
        if options.prefill is not None or options.decode is not None or options.mixed < 1:
            raise UsageError("--mixed N takes 1 or more, and stands alone: without --prefill and --decode")
        return {"mixed": options.mixed}
    prefill = 1 if options.prefill is None else options.prefill
    decode = 1 if options.decode is None else options.decode
    if prefill < 1 or decode < 1:
        raise UsageError("--prefill and --decode take 1 or more; for workers that do both use --mixed N")
    return {"prefill": prefill, "decode": decode}


def _tensor_parallel_sizes(options: argparse.Namespace, roles: Collection[Role]) -> dict[Role, int]:
    own: dict[Role, int | None] = {
        "prefill": options.prefill_tensor_parallel_size,
        "decode": options.decode_tensor_parallel_size,
    }
    if "mixed" in roles and any(size is not None for size in own.values()):
        raise UsageError("--mixed N goes with --tensor-parallel-size, the same for all workers")
    common: int = options.tensor_parallel_size
    sizes: dict[Role, int] = {}
    for role in roles:
        size = own.get(role)
        sizes[role] = common if size is None else size
    return sizes


def _model_folder(options: argparse.Namespace) -> Path:
    return bundled().get(options.model) or Path(options.model)


def _model_name(options: argparse.Namespace) -> str:
    return options.served_model_name or options.model
