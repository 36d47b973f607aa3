"""GET /cluster/support/NAME: the parts of a support bundle."""

import asyncio
from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as InPath

from tidemill.cluster.edge.requests.context import Parts
from tidemill.cluster.edge.requests.usage import Json
from tidemill.workers.messages import RequestError


def add_support_routes(app: FastAPI, parts: Parts) -> None:
    async def support(name: Annotated[str, InPath(max_length=64)]) -> Json:
        """Return settings without secrets, versions, nodes, ends of logs: what `tidemill support-bundle`
        collects."""
        part = parts.get(name)
        if part is None:
            there = ", ".join(parts) or "none"
            raise RequestError(f"there is no part {name!r}: there is {there}", param="name", status=404)
        return {name: await asyncio.to_thread(part)}

    app.add_api_route("/cluster/support/{name}", support)
