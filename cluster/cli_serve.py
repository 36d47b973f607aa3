"""The options of `tidemill serve`, and the cluster that they describe."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from tidemill.cluster.autoscale import Bounds
from tidemill.cluster.cli_files import UsageError, models_of
from tidemill.cluster.cli_telemetry import add_telemetry_options
from tidemill.cluster.http.bounds import EdgeLimits
from tidemill.cluster.settings import (
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    worker_name,
)
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.models.bundled import bundled
from tidemill.workers.settings import EngineSettings


def add_serving_options(serve: argparse.ArgumentParser) -> None:
    edge = serve.add_argument_group("endpoint")
    _add(edge.add_argument, "--host", "127.0.0.1", "address to listen on")
    _add(edge.add_argument, "--port", 8000, "0 takes a free one")
    edge.add_argument(
        "--grpc-port", type=int, metavar="PORT", help="serve gRPC as well, on this port; 0 takes a free one"
    )
    _add(
        edge.add_argument,
        "--send-timeout",
        EdgeLimits().send_s_max,
        "end an answer of which the client takes nothing for so long",
        metavar="SECONDS",
    )
    edge.add_argument("--config", type=Path, metavar="FILE", help="YAML with options of this command")
    edge.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="YAML with several models, each with options of its own; options given here count for all",
    )
    _add_model_options(serve)
    _add_cluster_options(serve)
    add_telemetry_options(serve)


def edge_limits(options: argparse.Namespace) -> EdgeLimits:
    if not options.send_timeout > 0:
        raise UsageError("--send-timeout takes more than 0")
    return EdgeLimits(send_s_max=options.send_timeout)


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    """What each model of an endpoint may have of its own."""
    model = serve.add_argument_group("model")
    model.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model; of several names replies and metrics carry the first",
    )
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="limit of prompt and output together"
    )
    _add(
        model.add_argument,
        "--ttft-max",
        60.0,
        "refuse at once (429) what would wait longer than this for its first token",
        metavar="SECONDS",
    )
    _add(model.add_argument, "--routers", 1, "routers; requests go on when one is lost", metavar="N")
    _add_worker_options(serve)
    _add_memory_options(serve)


def _add_worker_options(serve: argparse.ArgumentParser) -> None:
    workers = serve.add_argument_group("workers")
    workers.add_argument("--prefill", type=int, metavar="N", help="workers that compute prompts (1)")
    workers.add_argument("--decode", type=int, metavar="N", help="workers that generate (1)")
    workers.add_argument("--mixed", type=int, metavar="N", help="workers that do both, instead of these two")
    for role in ("prefill", "decode", "mixed"):
        workers.add_argument(
            f"--{role}-max",
            type=int,
            metavar="N",
            help=f"more {role} workers are started under load, up to so many in all",
        )
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
    _add_device_options(serve)


def _add_device_options(serve: argparse.ArgumentParser) -> None:
    device = serve.add_argument_group("device")
    _add(device.add_argument, "--device", "cpu", "what workers compute on: cpu, cuda, cuda:1", metavar="NAME")
    device.add_argument(
        "--kernels",
        choices=["cpu", "triton", "reference"],
        help="operator variants (cpu; on CUDA triton)",
    )
    device.add_argument(
        "--backing",
        choices=["fixed", "mmap", "kvcached"],
        help="whose memory holds pages and states: fixed takes all of it at once, the others what is used "
        "(mmap; on CUDA kvcached)",
    )
    device.add_argument(
        "--enforce-eager", action="store_true", help="on CUDA: launch decode steps without CUDA graphs"
    )


def _add_cluster_options(serve: argparse.ArgumentParser) -> None:
    cluster = serve.add_argument_group("cluster")
    cluster.add_argument(
        "--store",
        metavar="URL",
        help="where workers exchange pages: file:///path?size=8GiB, mooncake?size=8GiB (started here), "
        "mooncake://host:port, or several tiers with commas between them, the nearest first (a folder of its "
        "own, removed at the end)",
    )
    cluster.add_argument(
        "--store-secret-file",
        type=Path,
        metavar="PATH",
        help="holds 32 secret bytes, in hex, base64 or as they are, that seal what is stored",
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
    add_argument: Callable[..., object], name: str, default: str | float, text: str, **more: object
) -> None:
    add_argument(name, default=default, type=type(default), help=f"{text} (%(default)s)", **more)


def summary(options: argparse.Namespace) -> str:
    """What is served: `keeper with 1 prefill + 1 decode`. Raises UsageError."""
    models = [
        f"{', '.join(model_names(model))} with "
        + " + ".join(f"{count} {role}" for role, count in worker_counts(model).items())
        for model in models_of(options, _add_model_options)
    ]
    return "; ".join(models)


def cluster_settings(options: argparse.Namespace, store_url: str, cache_folder: Path) -> ClusterSettings:
    """Raises UsageError."""
    models = models_of(options, _add_model_options)
    labels = [_label(model_names(model)[0]) if len(models) > 1 else "" for model in models]
    for what in (labels, [name for model in models for name in model_names(model)]):
        if twice := {one for one in what if what.count(one) > 1}:
            raise UsageError(f"two models are called {min(twice)}: give each a served-model-name of its own")
    return ClusterSettings(
        fleets=tuple(
            _fleet(model, label, store_url, cache_folder) for model, label in zip(models, labels, strict=True)
        ),
        ray_address=options.ray_address,
    )


def _label(name: str) -> str:
    """What names of workers start with: `qwen-qwen3-next` of Qwen/Qwen3-Next."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _fleet(options: argparse.Namespace, label: str, store_url: str, cache_folder: Path) -> FleetSettings:
    counts = worker_counts(options)
    sizes = _tensor_parallel_sizes(options, counts)
    memory_bytes = bytes_of(options.memory, "--memory")
    floor = options.memory_floor
    engine = EngineSettings(
        model_folder=model_folder(options),
        memory_bytes=memory_bytes,
        memory_max_bytes=memory_bytes * (sum(counts.values()) if options.memory_broker else 2),
        memory_floor_bytes=None if floor is None else bytes_of(floor, "--memory-floor"),
        starts_at_floor=options.memory_broker,
        eviction=options.eviction_policy,
        checkpoints_per_path=options.checkpoints_per_path,
        checkpoint_strategy=options.checkpoint_strategy,
        checkpoint_interval=options.checkpoint_interval,
        store_url=store_url,
        store_secret_file=options.store_secret_file,
        cache_folder=cache_folder,
        page_tokens=options.page_size,
        kv_dtype=options.kv_cache_dtype,
        device=options.device,
        kernels=options.kernels,
        backing=options.backing,
        enforce_eager=options.enforce_eager,
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
            name=worker_name(label, role, index),
            role=role,
            engine=replace(engine, tensor_parallel_size=sizes[role]),
        )
        for role, count in counts.items()
        for index in range(count)
    ]
    return FleetSettings(
        label=label,
        names=model_names(options),
        workers=tuple(workers),
        router=_routers(options, label, frozenset(worker.name for worker in workers)),
        bounds=_bounds(options, counts),
    )


def _routers(options: argparse.Namespace, label: str, expected: frozenset[str]) -> RouterSettings:
    if options.routers < 1:
        raise UsageError("--routers takes 1 or more")
    return RouterSettings(
        name=f"{label}-router" if label else "router",
        replicas=options.routers,
        broker=options.memory_broker,
        expected=expected,
        ttft_s_max=options.ttft_max,
    )


def worker_counts(options: argparse.Namespace) -> dict[Role, int]:
    if options.mixed is not None:
        if options.prefill is not None or options.decode is not None or options.mixed < 1:
            raise UsageError("--mixed N takes 1 or more, and stands alone: without --prefill and --decode")
        return {"mixed": options.mixed}
    prefill = 1 if options.prefill is None else options.prefill
    decode = 1 if options.decode is None else options.decode
    if prefill < 1 or decode < 1:
        raise UsageError("--prefill and --decode take 1 or more; for workers that do both use --mixed N")
    return {"prefill": prefill, "decode": decode}


def _bounds(options: argparse.Namespace, counts: Mapping[Role, int]) -> dict[Role, Bounds]:
    bounds: dict[Role, Bounds] = {}
    for role in get_args(Role):
        most = getattr(options, f"{role}_max")
        if most is None:
            continue
        least = counts.get(role)
        if least is None or most < least:
            raise UsageError(
                f"--{role}-max {most}: set it to --{role} or more, with at least one such worker"
            )
        bounds[role] = Bounds(least=least, most=most)
    return bounds


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


def model_folder(options: argparse.Namespace) -> Path:
    return bundled().get(options.model) or Path(options.model)


def model_names(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(options.served_model_name or (options.model,))


def bytes_of(size: str, option: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error
