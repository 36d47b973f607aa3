"""Restore the logging of the process after tests that set it up."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from tidemill.cluster.observability.logs import OURS


@contextmanager
def same_logs_afterwards() -> Generator[None]:
    """Restore handlers and levels at the end of the block."""
    root, ours = logging.getLogger(), logging.getLogger(OURS)
    handlers, levels = list(root.handlers), (root.level, ours.level)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
