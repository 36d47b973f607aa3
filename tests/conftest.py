"""Settings of the whole suite."""

import asyncio
import gc
import inspect
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.e2e.server import SHARES_SERVER, marked
from tidemill.cluster.settings import ray_environ

# Ray reads its environment when it is imported, by whichever test is collected first.
os.environ.update(ray_environ(joins=False, token=secrets.token_hex(16)))

# No process finds modules in its working directory, so those of the tests are named here.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)

# A shell starts what it runs in the background deaf to Ctrl-C, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Equal runs on every machine, however slow: a deadline would be a speed check.
settings.register_profile("tidemill", deadline=None, derandomize=True)
settings.load_profile("tidemill")

TEST_S_MAX = 300
"""The time after which a test hangs: far beyond the slowest machine's."""


def pytest_collection_finish() -> None:
    """Keep all that was imported out of the collections of garbage, of which each engine that starts makes
    several: each would take half a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_logs() -> Iterator[None]:
    """Restore levels and handlers after a test that starts a log as a process does."""
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in (None, "tidemill")]
    levels, handlers = [logger.level for logger in loggers], list(root.handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    root.handlers[:] = [
        handler
        for handler in root.handlers
        if handler in handlers or type(handler).__module__ == "_pytest.logging"
    ]


def run_bounded(test: Coroutine[None, None, None]) -> None:
    """Run a coroutine by asyncio.run; one that hangs fails where it waits."""

    async def bounded() -> None:
        async with asyncio.timeout(TEST_S_MAX):
            await test

    asyncio.run(bounded())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine by its mark `run_with`, also with its `seed`, else by run_bounded."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    mark = pyfuncitem.get_closest_marker("run_with")
    run: Callable[..., object] = run_bounded if mark is None else mark.args[0]
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    seeds = given.keys() & {"seed"} & inspect.signature(run).parameters.keys()
    run(test(**given), **{name: given[name] for name in seeds})
    return True


class ByServer(LoadFileScheduling):
    """Gives all tests of a file, or of the files that share a server, to one process.

    The third process takes files from the end: two wait for the servers of e2e, and it computes meanwhile."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id == "gw2":
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Drop the files of which a process that crashed had run all tests: xdist gives them back to the
        queue, and waits forever for the end of one of their tests."""
        for file in [file for file, are_done in self.workqueue.items() if all(are_done.values())]:
            del self.workqueue[file]
        super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "the shared server" if file in SHARES_SERVER else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer | None:
    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """Kill what a process of tests that crashed, or was ended because it hung, leaves."""
    if error:
        for process in marked(node.workerinput["testrunuid"], "PYTEST_XDIST_TESTRUNUID"):
            with suppress(psutil.Error):
                if process.environ().get("PYTEST_XDIST_WORKER") == node.gateway.id:
                    process.kill()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels: one for all processes of a run, which compile each source once, or that
    of `python -m tests.mutations` for all its runs."""
    base = tmp_path_factory.getbasetemp()
    of_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Path(os.environ.get("KERNEL_CACHE", of_run / "kernels"))
