"""Tests that are coroutines, each run to its end by the loop that its decorator names."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec

import pytest

from tests.support.sim.loop import simulate

Given = ParamSpec("Given")
Main = Coroutine[Any, Any, None]


def run_by(
    run: Callable[[Main], object],
) -> Callable[[Callable[Given, Main]], Callable[Given, None]]:
    """Return a decorator that makes a test of a coroutine function, whose coroutine `run` runs."""

    def decorate(test: Callable[Given, Main]) -> Callable[Given, None]:
        @wraps(test)
        def runs(*arguments: Given.args, **named: Given.kwargs) -> None:
            run(test(*arguments, **named))

        return runs

    return decorate


def in_loop(test: Callable[Given, Main]) -> Callable[Given, None]:
    """Run a test in a loop of its own."""
    return run_by(asyncio.run)(test)


IN_VIRTUAL_TIME = pytest.mark.run_with.with_args(partial(simulate, 0))
"""The mark of files whose tests are coroutines for a loop whose clock jumps to the next timer."""
