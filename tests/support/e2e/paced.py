"""A real server whose engines have no model but a capacity: prompt tokens per second, and rows.

python -m tests.support.e2e.paced '{"workers": {"mixed-0": "mixed"}, "tokens_per_s": 300,
"rows_max": 32}'
"""

import asyncio
import json
import os
import secrets
import sys
import time
import uuid
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from tests.support.cluster.fake_engine import worker
from tidemill.cluster.messages import Bounds, Hysteresis
from tidemill.cluster.settings import (
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    ray_environ,
)

KEEPER = Path(__file__).parents[3] / "workers" / "models" / "keeper"
MEMORY_BYTES = 1 << 30


def serve(options: dict[str, Any]) -> None:
    """Serve until a signal arrives; the first line of the output is the URL."""
    os.environ.update(ray_environ(joins=False, token=secrets.token_hex(16)))
    from tidemill.cluster.edge.requests.context import Sources  # noqa: PLC0415 - Ray reads the environment when imported
    from tidemill.cluster.edge.requests.limits import EdgeLimits  # noqa: PLC0415 - the same
    from tidemill.cluster.processes.endpoint.endpoint import Endpoint  # noqa: PLC0415 - the same
    from tidemill.cluster.processes.server import serve  # noqa: PLC0415 - the same

    def workers(fleet: dict[str, Any]) -> tuple[WorkerSettings, ...]:
        sizes = {"max_num_batched_tokens": fleet["tokens_per_s"], "max_num_seqs": fleet["rows_max"]}
        given = {"model_folder": KEEPER, "memory_bytes": MEMORY_BYTES, **sizes}
        return tuple(worker(name, role, **given) for name, role in fleet["workers"].items())

    async def work(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    sources = Sources(
        clock_s=time.monotonic, unix_time_s=time.time, new_id=lambda: uuid.uuid4().hex, rng=Random(1)
    )
    endpoint = Endpoint(host="127.0.0.1", port=0, limits=EdgeLimits(send_s_max=options["send_s_max"]))
    bounds = {role: Bounds(least=1, most=most) for role, most in options.get("most", {}).items()}
    hysteresis = Hysteresis(**options.get("hysteresis", {}))
    paced = workers(options)
    fleets = [FleetSettings(workers=paced, names=("paced",), bounds=bounds, hysteresis=hysteresis)]
    fleets += [  # other models, which nothing scales but people
        FleetSettings(
            workers=workers({**options, **other}),
            names=(name,),
            router=RouterSettings(name=f"router-{name}"),
            hysteresis=hysteresis,
            label=name,
        )
        for name, other in options.get("others", {}).items()
    ]
    settings = ClusterSettings(fleets=tuple(fleets))
    serve(endpoint, settings, sources, Console(stderr=True), work)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
