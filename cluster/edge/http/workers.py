"""Operator commands over HTTP: drain a worker, change its role, scale a role."""

from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field

from tidemill.cluster.edge.requests.models import EdgeModels
from tidemill.cluster.edge.requests.usage import Json
from tidemill.workers.messages import Role

WORKERS_MAX = 1024
"""The most workers of a role; a larger number is a mistake."""

Count = Annotated[int, Field(ge=0, le=WORKERS_MAX)]
Name = Annotated[str, InPath(max_length=256)]


class DrainBody(BaseModel):
    """The body of a drain. `drain`: hand everything over and take no more, or take work again. `force`: also
    if no other worker does its work."""

    model_config = ConfigDict(strict=True, extra="forbid")

    drain: bool = True
    force: bool = False


class RoleBody(BaseModel):
    """A role: prefill, decode, or mixed for both."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Role


class ScaleBody(BaseModel):
    """The body of a scale. `workers`: the number of each role. `pending`: new workers that the cluster cannot
    schedule wait instead of being refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    workers: Annotated[dict[Role, Count], Field(min_length=1)]
    model: str | None = None
    pending: bool = False


def add_worker_routes(app: FastAPI, models: EdgeModels) -> None:
    """Add the commands. A command to one worker takes effect with its next heartbeat; the reply is its name
    and the command."""

    async def drain(name: Name, body: DrainBody) -> Json:
        """Take a worker out of service, or return it."""
        await models.order(lambda service: service.drain(name, drain=body.drain, force=body.force))
        return {"worker": name, "drain": body.drain}

    async def set_role(name: Name, body: RoleBody) -> Json:
        """Give a worker another role."""
        await models.order(lambda service: service.set_role(name, body.role))
        return {"worker": name, "role": body.role}

    async def roles(model: str | None = None) -> Json:
        """Return the wanted number of workers per role, of one model or of all, and the changes in
        progress."""
        found = models if model is None else [models.find(model)]
        rows = [
            {"model": model.name, **asdict(role)} for model in found for role in await model.service.roles()
        ]
        return {"roles": rows}

    async def scale(body: ScaleBody) -> Json:
        """Change the number of workers of a role: new ones start, others hand their work over and leave. The
        reply is immediate; GET shows the progress."""
        model = models.find(body.model)
        lacks = await model.service.scale(body.workers, pending=body.pending)
        return {**await roles(model.name), "lacks": lacks}

    app.add_api_route("/cluster/scale", roles)
    app.add_api_route("/cluster/scale", scale, methods=["POST"])
    app.add_api_route("/cluster/workers/{name}/drain", drain, methods=["POST"])
    app.add_api_route("/cluster/workers/{name}/role", set_role, methods=["POST"])
