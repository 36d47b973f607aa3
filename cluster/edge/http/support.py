"""GET /cluster/support/NAME, the parts of a support bundle, and GET /server_info as SGLang has it."""

import asyncio
from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as InPath

from tidemill import __version__
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.messages import WorkerStatus
from tidemill.workers.messages import RequestError

SETTINGS = "config"
"""The part of a support bundle with the settings, without secrets."""


def add_support_routes(app: FastAPI, context: EdgeContext) -> None:
    parts = context.parts

    async def support(name: Annotated[str, InPath(max_length=64)]) -> Json:
        """Return settings without secrets, versions, nodes, ends of logs: what `tidemill support-bundle`
        collects."""
        part = parts.get(name)
        if part is None:
            there = ", ".join(parts) or "none"
            raise RequestError(f"there is no part {name!r}: there is {there}", param="name", status=404)
        return {name: await asyncio.to_thread(part)}

    async def server_info() -> Json:
        """Return version, models and settings without secrets, and the state of each worker."""
        models, fleets = list(context.models), await context.models.fleets()
        settings = parts.get(SETTINGS)
        return {
            "version": __version__,
            "served_model_name": models[0].name,
            "model_path": str(models[0].served.folder),
            "context_length": models[0].served.max_model_len,
            "models": [model.json() for model in models],
            "internal_states": [
                _state(name, worker) for name, status in fleets.items() for worker in status.workers
            ],
            "settings": None if settings is None else await asyncio.to_thread(settings),
        }

    app.add_api_route("/cluster/support/{name}", support)
    for path in ("/server_info", "/get_server_info"):
        app.add_api_route(path, server_info)


def _state(model: str, worker: WorkerStatus) -> Json:
    """Return a worker's state in SGLang's words; bytes for its memory."""
    counters = worker.load.counters
    trials = counters.get("spec_trials", 0.0)
    accepted = counters.get("spec_accepted_tokens", 0.0)
    return {
        "model": model,
        "worker": worker.info.name,
        "role": worker.info.role,
        "tp_size": worker.info.tensor_parallel_size,
        "num_running_reqs": worker.load.running_rows,
        "num_waiting_reqs": worker.load.waiting_rows,
        "memory_usage": {**worker.load.memory, "budget": worker.load.budget_bytes},
        "avg_spec_accept_length": 1 + accepted / trials if trials else None,
    }
