"""The contract of an engine: what a worker process, its heartbeats and its edges need of one.

    HostedSettings -> Build -> HostedEngine: an Engine, its facts (EngineInfo), the other ranks

`workers/engine/build.py` builds ours. An adapter of another engine is a module with a `Build` and a `Check`
of its own, which `WorkerSettings` names; that of vLLM is workers/vllm/build.py.
Messages: Request, Produced, Delta, Announcement, WorkerLoad. Facts: EngineInfo. Errors: RequestError (the
engine refuses the request), PagesMissing, HandedOver, WorkerGone. All are in `workers/messages.py`.
"""

from collections.abc import Callable
from typing import Protocol

from tidemill.workers.inbox import Emit
from tidemill.workers.messages import Announcement, Delta, EngineInfo, Produced, Request, WorkerLoad
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import HostedSettings


class StreamingEngine(Protocol):
    """Runs the calls of edges. `notify` is for requests on trial: see workers/scheduling/isolation.py."""

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        """Make the store hold every page below the prompt's last page boundary, and the checkpoint there, or
        keep them for a decode worker that gets the `handoff` of the answer."""
        ...

    async def prefetch(self, request: Request) -> Produced:
        """Fetch the pages of the prompt as they appear in the store, until cancelled."""
        ...

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        """Emit the tokens of the request, one delta per step."""
        ...

    def release(self, tenant: str, name: str) -> None:
        """Drop what the tenant retains under this session."""
        ...


class RestrictableEngine(Protocol):
    """Takes only some kinds of work, by its role and while it drains."""

    def restrict(self, *, produces: bool, generates: bool) -> None:
        """Take only such calls from now on; other calls end with HandedOver."""
        ...


class AnnouncingEngine(Protocol):
    """Knows the depths that it can restore, by the keys of `kvstore/keys.py`."""

    def take_announcement(self, *, full: bool) -> Announcement:
        """Return what was added and removed since the last call, or all that there is."""
        ...


class ReportingEngine(RestrictableEngine, AnnouncingEngine, Protocol):
    """Reports to routers, and takes their orders."""

    @property
    def progress(self) -> int:
        """A number that grows while the engine works or waits for work."""
        ...

    def load(self) -> WorkerLoad: ...
    def resize(self, budget_bytes: int) -> None: ...


class RunningEngine(StreamingEngine, ReportingEngine, Protocol):
    """Serves from `run` on, until it is cancelled."""

    async def run(self) -> None: ...
    async def drain_publications(self) -> None:
        """Wait until all that it stores in the background is stored or refused."""
        ...


class WatchedGroup(Protocol):
    """The other ranks of the worker."""

    async def watch(self) -> None:
        """Raise when one of them is gone."""
        ...


class HostedEngine(Protocol):
    """The result of a Build."""

    @property
    def engine(self) -> RunningEngine: ...
    @property
    def group(self) -> WatchedGroup | None: ...
    @property
    def info(self) -> EngineInfo: ...


Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) while weights load."""


class Check(Protocol):
    """Raises the TidemillError that Build would, as far as it can be known without reading weights."""

    def __call__(self, settings: HostedSettings, *, here: bool) -> None:
        """`here`: the worker will run on this machine, so the check may look at its devices."""
        ...


Build = Callable[[HostedSettings, Progress, StartRanks], HostedEngine]
"""Builds an engine. Raises TidemillError or OSError, with one line that names the fix."""
