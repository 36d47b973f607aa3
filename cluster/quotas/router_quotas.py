"""The open answers and the tokens of API keys with limits, as a router counts them for all edges. Pure."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from tidemill.cluster.quotas.rates import MINUTE_S, Rates
from tidemill.workers.messages import COUNT_MAX, Count, Number, Positive

LEASE_S = 3.0
"""The time after which what an edge has open counts no more, unless the edge has renewed it."""

RETRY_S = 1.0
"""The time after which a client should ask again that has too many requests open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """The answers that an edge has open of the key `name`, and those that it wants to begin.

    `wanted` has the prompt tokens of each. `spent` tokens were generated since the edge's last
    request, and the key has paid `ahead_s` ahead, as the edge knows it.
    """

    name: str
    edge: str = ""
    open: Count = 0
    wanted: tuple[Count, ...] = ()
    spent: Count = 0
    ahead_s: Annotated[float, Meta(ge=0, le=COUNT_MAX)] = 0.0
    parallel_max: Count | None = None
    tokens_per_minute: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaGrant:
    """The first `granted` of the wanted answers may begin, the others after `wait_s`, because tokens are
    lacking or, with None, too many answers are open."""

    granted: Count
    ahead_s: Number
    wait_s: Number = 0.0
    lacking: Literal["tokens"] | None = None


class Quotas:
    """The state of each key. One that has tokens left for this minute may begin an answer of any size; what
    it takes beyond them is paid before the next one."""

    def __init__(self) -> None:
        self.rates = Rates()
        self._open: dict[str, dict[str, tuple[int, float]]] = {}  # by key and edge, until when

    def ask(self, asked: QuotaRequest, now_s: float) -> QuotaGrant:
        """Note what an edge has open and has spent, and grant what the limits allow."""
        known = self._open.pop(asked.name, {})
        edges = {edge: kept for edge, kept in known.items() if edge != asked.edge and kept[1] > now_s}
        room = len(asked.wanted)
        if asked.parallel_max is not None:
            room = asked.parallel_max - asked.open - sum(count for count, _ in edges.values())
        cost_s = MINUTE_S / asked.tokens_per_minute if asked.tokens_per_minute else 0.0
        ahead_s = self.rates.charge(asked.name, asked.spent * cost_s, now_s, asked.ahead_s)
        granted, wait_s, lacking = 0, 0.0, None
        for num_tokens in asked.wanted:
            if granted >= room:
                wait_s = RETRY_S
                break
            if cost_s and ahead_s + cost_s > MINUTE_S + 1e-9:
                wait_s, lacking = ahead_s + cost_s - MINUTE_S, "tokens"
                break
            ahead_s = self.rates.charge(asked.name, num_tokens * cost_s, now_s, ahead_s)
            granted += 1
        if asked.open + granted:
            edges[asked.edge] = (asked.open + granted, now_s + LEASE_S)
        if edges:
            self._open[asked.name] = edges
        return QuotaGrant(granted=granted, ahead_s=ahead_s, wait_s=wait_s, lacking=lacking)
