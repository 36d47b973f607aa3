"""The client of the supervisor for one fleet, for routers, the store of its journal, which they read, and the
nodes of Ray."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar, cast

import ray
import ray._private.utils
import ray._private.worker
import ray._raylet
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from tidemill.cluster.messages import JoinAnswer, JoinRequest, Misses
from tidemill.cluster.orders import SupervisorOrder
from tidemill.cluster.processes.scaling.node_fit import Node
from tidemill.workers.messages import Unserved

RAY: Any = ray  # much of it has no types
RAY_WORKER: Any = ray._private.worker  # noqa: SLF001 - see `keep_stdout`
PRINT = RAY_WORKER.print_to_stdstream

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)

KV_NAMESPACE = b"tidemill"

SUPERVISOR = "supervisor"
"""The name of the actor; Ray has one of a name in a namespace."""

ANSWER_S_MAX = 9.0
"""The time for the supervisor to answer, which may wait for a router, or to be restarted."""

RETRY_S = 0.1


async def find_actor(name: str, namespace: str) -> Any:  # noqa: ANN401 - Ray's types
    """Return the actor of this name. Raises ValueError if there is none.

    Without GCS this takes a minute.
    It has a thread of its own, because a process that ends waits for the threads of asyncio.
    """
    return await asyncio.wrap_future(beside(lambda: RAY.get_actor(name, namespace)))


def beside(work: Callable[[], ResultT]) -> Future[ResultT]:
    """Do something in a thread for which the end of this process does not wait. It cannot be cancelled."""
    done = Future[ResultT]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            done.set_exception(error)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return done


def exit_on_error(task: asyncio.Task[Any], what: str, *, report_s: float = 0.0) -> None:
    """End this process if a task of it broke, after `report_s`, in which callers get the error. Ray starts
    the next one, which is better than one of which a half works."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the %s broke", what, exc_info=error)
        task.get_loop().call_later(report_s, os._exit, 1)


class RayStore:
    """Ray's internal key-value store, which is part of GCS, as a JournalStore."""

    def __init__(self) -> None:
        self._gcs: Any = internal_kv_get_gcs_client()

    def put_new(self, key: str, value: bytes) -> bool:
        return self._gcs.internal_kv_put(key.encode(), value, overwrite=False, namespace=KV_NAMESPACE) == 1

    def get(self, key: str) -> bytes | None:
        return self._gcs.internal_kv_get(key.encode(), KV_NAMESPACE)

    def delete(self, key: str) -> None:
        self._gcs.internal_kv_del(key.encode(), del_by_prefix=False, namespace=KV_NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._gcs.internal_kv_keys(prefix.encode(), KV_NAMESPACE)]


class SupervisorClient:
    """The client of the supervisor in a Ray namespace, for the fleet whose first router is `fleet`. Each call
    may be carried out twice, and raises Unserved while the supervisor is away, or the error that it answers.
    """

    def __init__(self, fleet: str, namespace: str) -> None:
        self._fleet = fleet
        self._namespace = namespace
        self._actor: Any = None  # the last that answered; to find one asks GCS

    async def carry_out(self, order: SupervisorOrder) -> object:
        """See Supervisor.carry_out. A token that is ordered twice is refused the second time."""
        return await self._call(lambda actor: actor.carry_out.remote(self._fleet, order))

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int:
        more = (open_requests,) if open_requests else ()  # the supervisor of 0.2 has no such argument
        return await self._call(lambda actor: actor.report.remote(self._fleet, edge, misses, resets, *more))

    async def failed_rounds(self) -> int:
        return await self._call(lambda actor: actor.failed_rounds.remote())

    async def join(self, request: JoinRequest) -> JoinAnswer:
        return await self._call(lambda actor: actor.join.remote(request))

    async def _call(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - Ray's types
        away = "it does not answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                while True:
                    actor, self._actor = self._actor, None
                    try:
                        actor = actor or await find_actor(SUPERVISOR, self._namespace)
                        answer = await call(actor)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except (ray.exceptions.RayError, ValueError) as error:
                        away = str(error).partition("\n")[0]
                        await asyncio.sleep(RETRY_S)
                    else:
                        self._actor = actor
                        return answer
        raise Unserved(f"the supervisor is away ({away}): ask again in some seconds")


def nodes() -> list[Node]:
    """Return the nodes of the Ray cluster that are up."""
    free = cast("dict[str, dict[str, float]]", available_resources_per_node())
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"]) or node["Resources"],  # a new node has not reported yet
            labels=node["Labels"],
        )
        for node in RAY.nodes()
        if node["Alive"]
    ]


def note_signals(numbers: Iterable[int]) -> None:
    """Let the first of these signals do nothing but wake this process, until the caller sets other ones. To
    be called before `ray.init`: an exception of a handler would leave half a connection there, and shutting
    it down would end the process by SIGSEGV."""
    _take_failure_signals()
    ray._private.utils.set_sigterm_handler = _set_none  # noqa: SLF001 - as it would set one that raises
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def _set_none(sigterm_handler: object) -> None: ...


def _note(number: int, _: FrameType | None) -> None:
    """Leave a signal to the descriptor that wakes this process. The next one ends a Ray that hangs."""
    signal.signal(number, signal.default_int_handler)


def _take_failure_signals() -> None:
    """Install Ray's handler of fatal signals, which ends a process with a trace, also for SIGTERM. Ray does
    so once, and else in the middle of `ray.init`."""
    with contextlib.suppress(AttributeError):  # another version of Ray
        library = ctypes.CDLL(ray._raylet.__file__)  # noqa: SLF001 - it has no public name
        install = library["_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"]
        install.argtypes, install.restype = (ctypes.c_char_p, ctypes.c_int), None
        install(None, 0)


def keep_stdout() -> None:
    """Let Ray print to standard error what it would print to standard output, which has our lines alone. Who
    has read them may read no more; then `ray.shutdown` would wait for the thread that prints."""

    def to_stderr(data: Mapping[str, Any], **options: Any) -> None:  # noqa: ANN401 - Ray's
        PRINT({**data, "is_err": True}, **options)

    RAY_WORKER.print_to_stdstream = to_stderr
