"""Two vLLMs under Ray Serve LLM, and two under our workers: time and CPU of the same streams."""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from tests.support.e2e.engine_streams import STREAMS
from tests.support.sockets import free_port

from benchmarks.engines.scene import ENVIRON, MEMORY_BYTES, NAME, Figure, Scene, ask, prompts, warm
from benchmarks.peers.servers import started

OURS, THEIRS = "Tidemill", "Ray Serve LLM"
ORDER = (THEIRS, OURS, OURS, THEIRS)
ROUNDS = 3  # of each start
TOKENS = 128
ENGINE = "VLLM::"
"""The processes of vLLM's engine have names that begin so, in both. All others are in front of it."""

PROGRAM = """
import json, sys
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

model, name, port, folder, memory, environ = sys.argv[1:]
config = LLMConfig(
    model_loading_config={"model_id": name, "model_source": model},
    deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}},
    placement_group_config={"bundles": [{"CPU": 1}]},
    engine_kwargs={
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": int(memory),
        "enable_prefix_caching": True,
    },
    runtime_env={"env_vars": json.loads(environ)},
)
ray.init(_temp_dir=folder, num_cpus=8, include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
"""
"""The server of Ray Serve LLM, with the flags of `scene.FLAGS` and Ray's own defaults."""


class Cost(NamedTuple):
    """The time of some streams, and the CPU time of a token in all processes and in those in front of the
    engines, in s."""

    wall_s: float
    cpu_s: float
    front_s: float


def beside_ray_serve(scene: Scene) -> Iterator[Figure]:
    """Yield ratios of 8 streams. Each starts two vLLMs of its own, with the same flags, one after the other:
    four do not fit."""
    costs: dict[str, list[Cost]] = {OURS: [], THEIRS: []}
    rng = Random(3)
    for name in ORDER:
        with _running(scene, name) as (url, root):
            costs[name] += [_cost(url, root, prompts(rng, STREAMS, 64)) for _ in range(ROUNDS)]
    ours, theirs = (Cost(*map(median, zip(*costs[name], strict=True))) for name in (OURS, THEIRS))
    for what, value, other, scale, unit in (
        (f"time of {STREAMS} streams", ours.wall_s, theirs.wall_s, 1, "s"),
        ("CPU of a token in front of the engines", ours.front_s, theirs.front_s, 1e3, "ms"),
        ("CPU of a token with the engines", ours.cpu_s, theirs.cpu_s, 1e3, "ms"),
    ):
        details = f"medians {value * scale:.3g} and {other * scale:.3g} {unit}"
        yield Figure(f"{what} by that of {THEIRS}", value / other, 0.5, details)


@contextmanager
def _running(scene: Scene, name: str) -> Generator[tuple[str, psutil.Process]]:
    """Run two vLLMs behind one of both, and yield its URL and first process."""
    if name == OURS:
        with scene.tidemill("--mixed", "2") as server:
            yield server.url, psutil.Process(server.pid)
        return
    port = str(free_port())
    with TemporaryDirectory(prefix="serve-") as folder:  # a short path, for Ray's sockets
        given = [scene.source, NAME, port, folder, str(MEMORY_BYTES), json.dumps(ENVIRON)]
        environ = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
        url = f"http://127.0.0.1:{port}"
        command = [str(scene.routers), "-c", PROGRAM, *given]
        with started(command, environ, url, scene.folder / "ray_serve.log") as root:
            warm(url)
            yield url, root


def _cost(url: str, root: psutil.Process, asked: list[tuple[int, ...]]) -> Cost:
    before_s = _cpu_s(root)
    wall_s = ask(url, asked, TOKENS, STREAMS).wall_s
    cpu_s, front_s = (
        (now - then) / (STREAMS * TOKENS) for now, then in zip(_cpu_s(root), before_s, strict=True)
    )
    return Cost(wall_s, cpu_s, front_s)


def _cpu_s(root: psutil.Process) -> tuple[float, float]:
    """Return the CPU time of a process and all below it, and that without the engines, in s."""
    every_s = front_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            every_s += times.user + times.system
            front_s += 0.0 if process.name().startswith(ENGINE) else times.user + times.system
    return every_s, front_s
