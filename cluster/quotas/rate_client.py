"""The clients of routers that count requests, so that a limit of a key is one over all edges.

All edges ask the same router about a key, by rendezvous hashing, and the next one while it is away.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TypeVar

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.quotas.rates import Counted
from tidemill.cluster.quotas.router_quotas import QuotaGrant, QuotaRequest
from tidemill.cluster.rpc.channels import cancellable, connection_broke, open_channel, unary
from tidemill.cluster.rpc.codec import Malformed, RateCount, decode, encode

AnswerT = TypeVar("AnswerT")

COUNT_S_MAX = 0.5
"""The time for a router to answer, after which the next one is asked."""


class RouterRates:
    """Counts in routers. It belongs to one asyncio loop."""

    def __init__(self, edge: str, addresses: Callable[[], Sequence[str]], tls: MutualTls | None) -> None:
        """`edge` names this edge, and `addresses` returns those of all known routers."""
        self._edge = edge
        self._addresses = addresses
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def count(self, name: str, per_minute: int, ahead_s: float) -> Counted | None:
        """Count a request; see Rates. Return None when no router answers."""
        return await self._call("Count", name, RateCount(name, per_minute, ahead_s), Counted)

    async def ask(self, asked: QuotaRequest) -> QuotaGrant | None:
        """Ask for answers; see Quotas. Return None when no router answers."""
        return await self._call("Quota", asked.name, replace(asked, edge=self._edge), QuotaGrant)

    async def _call(self, method: str, name: str, asked: object, answer: type[AnswerT]) -> AnswerT | None:
        data = encode(asked)
        for address in in_order(self._addresses(), name):
            try:
                if address not in self._channels:
                    self._channels[address] = open_channel(address, self._tls)
                call = unary(self._channels[address], f"tidemill.Router/{method}")
                with cancellable():
                    return decode(answer, await call(data, timeout=COUNT_S_MAX))
            except grpc.aio.AioRpcError as error:
                if connection_broke(error) and address in self._channels:
                    # The next one reads our certificate again.
                    await self._channels.pop(address).close(COUNT_S_MAX)
            except (Malformed, OSError):
                continue
        return None

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def in_order(addresses: Sequence[str], name: str) -> list[str]:
    """Return the routers in the order in which every edge asks them about this name. One that comes or goes
    changes the first for its own share of names alone."""
    return sorted(set(addresses), key=lambda address: sha256(f"{name} {address}".encode()).digest())
