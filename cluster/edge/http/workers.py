"""Operator commands over HTTP: drain workers, change and scale roles, admit and revoke edges."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi import Path as InPath
from pydantic import BaseModel, Field

from tidemill.cluster.edge.requests.models import EdgeModels
from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.messages import MembersAnswer
from tidemill.cluster.orders import (
    Drain,
    ListEdges,
    MakeToken,
    Order,
    RevokeEdge,
    Roles,
    Scale,
    SetRole,
)
from tidemill.workers.messages import Role

WORKERS_MAX = 1024
"""The most workers of a role; a larger number is a mistake."""

TOKEN_S_MAX = 7 * 86_400

Count = Annotated[int, Field(ge=0, le=WORKERS_MAX)]
Name = Annotated[str, InPath(max_length=256)]


class DrainBody(BaseModel, strict=True, extra="forbid"):
    """The body of a drain. `drain`: hand everything over and take no more, or take work again. `force`: also
    if no other worker does its work."""

    drain: bool = True
    force: bool = False


class RoleBody(BaseModel, strict=True, extra="forbid"):
    """A role: prefill, decode, or mixed for both."""

    role: Role


class ScaleBody(BaseModel, strict=True, extra="forbid"):
    """The body of a scale. `workers`: the number of each role. `pending`: new workers that the cluster cannot
    schedule wait instead of being refused."""

    workers: Annotated[dict[Role, Count], Field(min_length=1)]
    model: str | None = None
    pending: bool = False


class TokenBody(BaseModel, strict=True, extra="forbid"):
    """A token for an edge of this `name`, which lasts for `life_s` seconds."""

    name: Annotated[str, Field(max_length=63)]
    life_s: Annotated[float, Field(gt=0, le=TOKEN_S_MAX)]


class RevokeBody(BaseModel, strict=True, extra="forbid"):
    """The `name` of an edge, or the serial of a certificate in hexadecimal digits."""

    name: Annotated[str, Field(min_length=1, max_length=128)]


def add_worker_routes(app: FastAPI, models: EdgeModels) -> None:
    """Add the commands. A command to one worker takes effect with its next heartbeat; the reply is its name
    and the command."""

    async def drain(name: Name, body: DrainBody) -> Json:
        """Take a worker out of service, or return it."""
        await models.order(Drain(name, body.drain, body.force))
        return {"worker": name, "drain": body.drain}

    async def set_role(name: Name, body: RoleBody) -> Json:
        """Give a worker another role."""
        await models.order(SetRole(name, body.role))
        return {"worker": name, "role": body.role}

    async def roles(model: str | None = None) -> Json:
        """Return the wanted number of workers per role, of one model or of all, and the changes in
        progress."""
        found = models if model is None else [models.find(model)]
        rows = [
            {"model": model.name, **asdict(role)}
            for model in found
            for role in await model.service.carry_out(Roles())
        ]
        return {"roles": rows}

    async def scale(body: ScaleBody) -> Json:
        """Change the number of workers of a role: new ones start, others hand their work over and leave. The
        reply is immediate; GET shows the progress."""
        model = models.find(body.model)
        lacks = await model.service.carry_out(Scale(body.workers, body.pending))
        return {**await roles(model.name), "lacks": lacks}

    app.add_api_route("/cluster/scale", roles)
    app.add_api_route("/cluster/scale", scale, methods=["POST"])
    app.add_api_route("/cluster/workers/{name}/drain", drain, methods=["POST"])
    app.add_api_route("/cluster/workers/{name}/role", set_role, methods=["POST"])


def add_member_routes(app: FastAPI, models: EdgeModels) -> None:
    async def carry_out(order: Order[MembersAnswer]) -> dict[str, Any]:
        return asdict(await models.find(next(iter(models)).name).service.carry_out(order))

    async def members() -> Json:
        """Return the edges that may join by a token or have joined, and the revoked certificates."""
        return await carry_out(ListEdges())

    async def make_token(body: TokenBody) -> Json:
        """Make a token, with which one edge gets a certificate, and return it with the address to join at."""
        return await carry_out(MakeToken(body.name, body.life_s))

    async def revoke(body: RevokeBody) -> Json:
        """Revoke the token and the certificates of an edge, or a certificate. Routers know it immediately."""
        return await carry_out(RevokeEdge(body.name))

    app.add_api_route("/cluster/edges", members)
    app.add_api_route("/cluster/edges", make_token, methods=["POST"])
    app.add_api_route("/cluster/edges/revoke", revoke, methods=["POST"])
