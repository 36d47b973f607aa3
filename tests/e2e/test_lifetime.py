"""The demo, as the README has it: it starts a whole server, asks it, and leaves nothing."""

import pytest

from tests.support.e2e.server import run_cli

pytestmark = pytest.mark.slow


def test_demo() -> None:
    ended, left = run_cli("demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers are right" in ended.stdout
    assert not left
