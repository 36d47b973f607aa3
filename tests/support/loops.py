"""Loops for tests that are coroutines: marks, and a decorator for those that hypothesis calls."""

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


IN_VIRTUAL_TIME = pytest.mark.run_with.with_args(partial(simulate, 0))
"""The mark of files whose tests are coroutines for a loop whose clock jumps to the next timer."""

IN_REAL_TIME = pytest.mark.run_with.with_args(asyncio.run)
"""The mark of a test in such a file that has threads."""
