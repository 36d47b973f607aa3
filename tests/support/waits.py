"""Bound of the waits in tests."""

import os

WAIT_S_MAX = float(os.environ.get("TEST_WAIT_S_MAX", "60"))
"""Seconds that only a failing test waits. Runs with planted bugs set fewer, because many make tests wait."""
