"""A page store on an event loop of its own, for an engine that has none."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.open_store import is_shared, open_store
from tidemill.kvstore.stores.page_store import Got, Objects, Put, StoreStats, wait_within
from tidemill.kvstore.stores.seal import Sealing
from tidemill.kvstore.stores.secret import read_secret

_Result = TypeVar("_Result")

CLOSE_S = 10.0


class StoreThread:
    """Calls of a store from any thread. Their results are futures, and no call raises for the store."""

    def __init__(self, url: str, secret_file: str | None) -> None:
        """Open the store. Blocking. Raises StoreError that names the fix."""
        if not is_shared(url):
            raise StoreError(f"store {url}: no other server sees it: use a folder or mooncake://host:port")
        self.sealing = Sealing(None if secret_file is None else read_secret(Path(secret_file)))
        self._store = open_store(url, self.sealing)
        self._stats = self._store.stats()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="tidemill-store", daemon=True)
        self._thread.start()

    def contains(self, keys: Sequence[ObjectKey]) -> "Future[list[bool]]":
        return self._run(self._store.contains(keys))

    def put(self, objects: Objects, ready: Callable[[], object] | None = None) -> "Future[list[Put]]":
        """Store objects, as soon as the blocking `ready` returns."""
        return self._run(self._put(objects, ready))

    def get(self, wanted: Objects) -> "Future[list[Got]]":
        """Fill each view, or give up when the store is late. A late transfer may still write the views."""
        return self._run(self._get(wanted))

    @property
    def is_down(self) -> bool:
        return self._store.patience_s(0) == 0

    def stats(self) -> StoreStats:
        """Return the counts as of the last call, and begin to count again: only the loop may do that."""
        self._loop.call_soon_threadsafe(self._count)
        return self._stats

    def close(self) -> None:
        """Wait a while for running transfers, and close. No call may follow."""
        closed = self._run(self._store.close())
        try:
            closed.result(CLOSE_S)
        except TimeoutError:
            closed.cancel()  # a call hangs in a library; its thread ends with the process
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _count(self) -> None:
        self._stats = self._store.stats()

    def _run(self, call: "Coroutine[Any, Any, _Result]") -> "Future[_Result]":
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def _put(self, objects: Objects, ready: Callable[[], object] | None) -> list[Put]:
        if ready is not None:
            await asyncio.to_thread(ready)
        return await self._store.put(objects)

    async def _get(self, wanted: Objects) -> list[Got]:
        num_bytes = sum(view.nbytes for _, view in wanted)
        getting = asyncio.ensure_future(self._store.get(wanted))
        await wait_within(lambda: self._store.patience_s(num_bytes), getting)
        return getting.result() if getting.done() else [Got.UNREACHABLE] * len(wanted)
