"""Orders to workers over HTTP: hand everything over, or have another role."""

from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict

from tidemill.cluster.http.models import Models
from tidemill.cluster.http.replies import Json
from tidemill.workers.messages import Role

Name = Annotated[str, InPath(max_length=256)]


class DrainBody(BaseModel):
    """`drain`: hand everything over and take no more, or take work again; `force`: also if no other worker
    does its work."""

    model_config = ConfigDict(strict=True, extra="forbid")

    drain: bool = True
    force: bool = False


class RoleBody(BaseModel):
    """prefill, decode, or mixed for both."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Role


def add_worker_routes(app: FastAPI, models: Models) -> None:
    """Both take effect with the worker's next heartbeat; the answer is its name and what it was told."""

    async def drain(name: Name, body: DrainBody) -> Json:
        """Take a worker out of service, or back into it."""
        await models.order(lambda service: service.drain(name, drain=body.drain, force=body.force))
        return {"worker": name, "drain": body.drain}

    async def set_role(name: Name, body: RoleBody) -> Json:
        """Give a worker another role."""
        await models.order(lambda service: service.set_role(name, body.role))
        return {"worker": name, "role": body.role}

    app.add_api_route("/cluster/workers/{name}/drain", drain, methods=["POST"])
    app.add_api_route("/cluster/workers/{name}/role", set_role, methods=["POST"])
