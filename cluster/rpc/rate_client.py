"""The clients of routers that count requests, so that the rate of a key is one over all edges.

All edges ask the same router about a key, by rendezvous hashing, and the next one while it is away.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rates import Counted
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import Malformed, RateCount, decode, encode

if TYPE_CHECKING:  # generic only in the type stubs
    UnaryMethod = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

COUNT_S_MAX = 0.5
"""The time for a router to answer, after which the next one is asked."""


class RouterRates:
    """Counts in routers. It belongs to one asyncio loop."""

    def __init__(self, addresses: Callable[[], Sequence[str]], tls: MutualTls | None) -> None:
        """`addresses` returns those of all known routers."""
        self._addresses = addresses
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def count(self, name: str, per_minute: int, ahead_s: float) -> Counted | None:
        """Count a request; see Rates. Return None when no router answers."""
        asked = encode(RateCount(name, per_minute, ahead_s))
        for address in in_order(self._addresses(), name):
            try:
                if address not in self._channels:
                    self._channels[address] = open_channel(address, self._tls)
                method: UnaryMethod = self._channels[address].unary_unary("/tidemill.Router/Count")
                return decode(Counted, await method(asked, timeout=COUNT_S_MAX))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and address in self._channels:
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
