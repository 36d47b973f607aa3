"""Settings of the whole suite."""

import os
import secrets
import signal

import pytest
from hypothesis import settings

from tidemill.cluster.settings import ray_environ

# Ray reads its environment when it is imported, by whichever test is collected first.
os.environ.update(ray_environ(joins=False, token=secrets.token_hex(16)))

# A shell starts what it runs in the background deaf to Ctrl-C, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Equal runs on every machine, however slow: a deadline would be a speed check.
settings.register_profile("tidemill", deadline=None, derandomize=True)
settings.load_profile("tidemill")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process run all tests of a file, or of a named group, so that they share their servers."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
