"""An engine on a thread of its own, for programs without an event loop; any thread may call it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import WorkerGone

T = TypeVar("T")

CLOSED = "the engine is closed: make a new one"


class EngineThread:
    """Runs steps from its start until `close`, or forever."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._closed = False
        self._sending = threading.Lock()  # nothing is sent to a loop that was stopped
        self._stepping: asyncio.Task[None] | None = None
        self._jobs: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which runs beside the steps. Whatever interrupts this call (Ctrl-C)
        cancels the work, and propagates when the work has ended. Raises WorkerGone when the engine is
        closed."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        if not self._send(lambda: self._start(work, done)):
            work.close()
            raise WorkerGone(CLOSED)
        try:
            return done.result()
        finally:
            if not done.done():
                self._send(lambda: self._jobs[done].cancel() if done in self._jobs else None)
                concurrent.futures.wait([done])

    def close(self) -> None:
        """Cancel what runs and release everything. Further calls do nothing."""
        self._send(self._closing.set)
        with self._sending:
            self._closed = True
        if threading.current_thread() is not self._thread:  # a garbage collector may run on any thread
            self._thread.join()

    def _send(self, act: Callable[[], object]) -> bool:
        with self._sending:
            if not self._closed:
                self._loop.call_soon_threadsafe(act)
            return not self._closed

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        engine = self._built.engine
        self._stepping = stepping = asyncio.create_task(engine.run())
        try:
            await self._closing.wait()
        finally:
            for job in self._jobs.values():
                job.cancel()
            await asyncio.gather(*self._jobs.values(), return_exceptions=True)
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            await engine.drain_publications()
            self._built.close()

    def _start(self, work: Coroutine[Any, Any, T], done: concurrent.futures.Future[T]) -> None:
        def ended(task: asyncio.Task[T]) -> None:
            del self._jobs[done]
            if task.cancelled():
                done.set_exception(WorkerGone(CLOSED))
            elif (error := task.exception()) is not None:
                error.__cause__ = error.__cause__ or self._broke()
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._jobs[done] = task = self._loop.create_task(work)
        task.add_done_callback(ended)

    def _broke(self) -> BaseException | None:
        if self._stepping is None or not self._stepping.done() or self._stepping.cancelled():
            return None
        return self._stepping.exception()
