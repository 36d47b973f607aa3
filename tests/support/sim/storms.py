"""Faults of a fake Mooncake store while a cluster uses it."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from tests.support.sim.fake_mooncake import FakeMooncake
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.remote_store import RemoteStore

TIMEOUT_S = 0.25

OUTAGE_S_MAX = 40.0
"""An outage longer than a frozen process blocks a call and a silent owner is remembered."""


class Storm:
    """Makes one fault after the other until it is cancelled, and repairs each."""

    def __init__(self, rng: Random, cluster: FakeMooncake, pause_s_max: float) -> None:
        self._rng = rng
        self._cluster = cluster
        self._pause_s_max = pause_s_max

    async def run(self) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            self._kill_master,
            self._freeze_master,
            self._fail_over,
            self._kill_owner,
            self._freeze_owner,
            self._lose_objects,
        ]
        while True:
            await asyncio.sleep(self._rng.random() * self._pause_s_max)
            await self._rng.choice(faults)()

    async def _outage(self) -> None:
        await asyncio.sleep(self._rng.choice([0.1, 3.0, OUTAGE_S_MAX]) * self._rng.random())

    async def _kill_master(self) -> None:
        self._cluster.kill_master()
        try:
            await self._outage()
        finally:
            self._cluster.start_master()

    async def _fail_over(self) -> None:
        try:
            await self._cluster.fail_over(keeps=self._rng.random() < 0.5)
        finally:
            self._cluster.start_master(keeps=True)

    async def _freeze_master(self) -> None:
        self._cluster.freeze_master()
        try:
            await self._outage()
        finally:
            self._cluster.thaw_master()

    async def _kill_owner(self) -> None:
        running = self._cluster.running_owners
        if not running:
            return
        self._cluster.kill_owner(self._rng.choice(running))
        try:
            await self._outage()
        finally:
            self._cluster.start_owner()

    async def _freeze_owner(self) -> None:
        running = self._cluster.running_owners
        if not running:
            return
        owner = self._rng.choice(running)
        self._cluster.freeze_owner(owner)
        try:
            await self._outage()
        finally:
            self._cluster.thaw_owner(owner)

    async def _lose_objects(self) -> None:
        for name in list(self._cluster.master.entries):
            if self._rng.random() < 0.2:
                del self._cluster.master.entries[name]


class Stores:
    """A client, a store and a circuit breaker for each incarnation of a worker."""

    def __init__(self, cluster: FakeMooncake) -> None:
        self.cluster = cluster
        self.guards: list[GuardedStore] = []

    def open(self) -> GuardedStore:
        store = RemoteStore(self.cluster.client(), lease_s=self.cluster.lease_s)
        self.guards.append(GuardedStore(store, TIMEOUT_S))
        return self.guards[-1]

    async def close(self) -> None:
        for guard in self.guards:
            await guard.close()
