"""The demo, as the README has it."""

import pytest

from tests.support.e2e.server import run_cli

pytestmark = pytest.mark.slow


def test_demo() -> None:
    ended, left = run_cli("demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers are right" in ended.stdout
    assert not left


def test_killed_answer_of_the_demo_is_the_calm_one() -> None:
    ended, left = run_cli("demo", "--kill")
    assert ended.returncode == 0, ended.stderr
    assert "kill -9 " in ended.stdout
    assert ended.stdout.endswith("diff: none\n600 tokens, all equal; 2 workers\n")
    assert not left
