"""Record the history of an edge; with several edges behind a port each has their sums, as in /metrics."""

import logging

from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.metrics.edge_samples import samples_of
from tidemill.kvstore.errors import TidemillError

log = logging.getLogger(__name__)


async def record_period(context: EdgeContext) -> None:
    """Add the period that ends now. Without a router its memory is empty; without another edge the period is
    left out, and the next one is longer."""
    if context.group is None:
        samples, is_whole = samples_of(context.metrics), True
    else:
        samples = await context.group.samples()
        is_whole = bool(samples.up) and all(samples.up.values())
    if not is_whole:
        log.info("a period is missing in the history: not every edge answers")
        return
    try:
        fleets = await context.models.fleets()
    except TidemillError:
        fleets = {}
    context.history.add(context.sources.unix_time_s(), samples, fleets)
