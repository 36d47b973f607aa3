"""Prefixes that clients ask the workers to retain, for later requests that begin with them."""

import asyncio

from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.apis.reply import Reply, Whole
from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.requests.bodies import PrefixBody
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter


async def retain_prefix(edge: EdgeContext, model: EdgeModel, body: PrefixBody, caller: Caller) -> Reply:
    """Compute a prompt for later requests that begin with it, and retain it. Repeat it to renew it."""
    job, prefix_id = await model.intake.prefix(body, caller)
    tally = UsageCounter(job)

    async def whole(_: object) -> bytes:
        """Return the prefix. No client sees its answer."""
        return json_bytes(
            {
                "id": prefix_id,
                "object": "prefix",
                "model": model.name,
                "tokens": len(job.requests[0].tokens),
                "cached_tokens": tally.cached_tokens(),
                "retain": body.retain_s(),
                "expires_at": int(edge.sources.unix_time_s() + body.retain_s()),
            }
        )

    writer = Whole(tally, len(job.requests), whole)
    return Reply(model=model, job=job, kind="prefix", id=prefix_id, writer=writer)


async def release_prefix(edge: EdgeContext, name: str, cache_salt: str | None, caller: Caller) -> Json:
    """Retain a prefix no longer. `cache_salt` is that of its request."""
    tenant = caller.tenant_with(cache_salt)
    session = session_of(tenant, "prefix", name)
    await asyncio.gather(*(model.service.release(tenant, session) for model in edge.models))
    return {"id": name, "object": "prefix", "deleted": True}
