"""Prefixes that clients ask the workers to retain, for later requests that begin with them."""

import asyncio
from collections.abc import Iterable

from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.apis.reply import Reply, Writer
from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.requests.bodies import PrefixBody
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter


async def retain_prefix(edge: EdgeContext, model: EdgeModel, body: PrefixBody, caller: Caller) -> Reply:
    """Compute a prompt for later requests that begin with it, and retain it. Repeat it to renew it."""
    job, prefix_id = await model.intake.prefix(body, caller)
    about: Json = {
        "id": prefix_id,
        "object": "prefix",
        "model": model.name,
        "tokens": len(job.requests[0].tokens),
    }
    writer = _Retained(edge, about, body.retain_s(), UsageCounter(job))
    return Reply(model=model, job=job, kind="prefix", id=prefix_id, writer=writer)


async def release_prefix(edge: EdgeContext, name: str, cache_salt: str | None, caller: Caller) -> Json:
    """Retain a prefix no longer. `cache_salt` is that of its request."""
    tenant = caller.tenant_with(cache_salt)
    session = session_of(tenant, "prefix", name)
    await asyncio.gather(*(model.service.release(tenant, session) for model in edge.models))
    return {"id": name, "object": "prefix", "deleted": True}


class _Retained(Writer):
    """Writes the prefix. No client sees its answer."""

    def __init__(self, edge: EdgeContext, about: Json, retained_s: float, tally: UsageCounter) -> None:
        super().__init__(tally)
        self._edge = edge
        self._about = about
        self._retained_s = retained_s

    async def close(self) -> Iterable[bytes]:
        whole: Json = {
            **self._about,
            "cached_tokens": self.tally.cached_tokens(),
            "retain": self._retained_s,
            "expires_at": int(self._edge.sources.unix_time_s() + self._retained_s),
        }
        return (json_bytes(whole),)
