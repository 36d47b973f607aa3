"""The start of a server: nothing that it waits for keeps a signal from ending it."""

import threading

import pytest

from tests.support.waits import WAIT_S_MAX
from tidemill.cluster.processes.supervisor_client import beside


def test_end_of_the_process_waits_for_no_work_beside_the_start() -> None:
    never, before = threading.Event(), set(threading.enumerate())
    waiting = beside(never.wait)
    assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]
    never.set()
    assert waiting.result(WAIT_S_MAX)
    with pytest.raises(ValueError, match="x"):
        beside(lambda: int("x")).result(WAIT_S_MAX)
