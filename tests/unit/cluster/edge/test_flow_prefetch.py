"""The decode worker prefetches a prompt while it is produced, until it is cancelled; no answer depends on
it."""

import asyncio
import gc
from contextlib import aclosing
from functools import partial
from typing import Literal

import pytest

from tests.support.cluster.scripted_peers import (
    INFO,
    Act,
    Hold,
    Script,
    a_request,
    check_answer,
    pieces_of,
    root_of,
    run,
)
from tidemill.cluster.edge.flow import serve
from tidemill.kvstore.errors import OutOfMemory
from tidemill.workers.inbox import generated
from tidemill.workers.messages import (
    PagesMissing,
    RequestError,
    StreamPiece,
    WorkerGone,
)


def reported(script: Script) -> tuple[list[StreamPiece], list[object]]:
    """Return the answer, and the errors that asyncio reports because they were not retrieved."""
    reports: list[object] = []

    async def main() -> list[StreamPiece]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reports.append(report.get("exception")))
        async with aclosing(generated(partial(serve, a_request(), script, script, root_of, INFO))) as pieces:
            answer = [piece async for piece in pieces]
        gc.collect()  # it reports when the task goes
        return answer

    return run(main()), reports


def test_decode_worker_fetches_while_the_prefill_worker_produces() -> None:
    async def main() -> None:
        script = Hold()
        async with aclosing(generated(partial(serve, a_request(1), script, script, root_of, INFO))) as pieces:
            first = asyncio.ensure_future(anext(pieces))
            await script.begun.wait()
            assert [kind for kind, _ in script.calls] == ["produce"]
            script.let_end.set()
            assert (await first).finish == "length"
        assert [kind for kind, _ in script.calls] == ["produce", "generate"]
        assert script.prefetched == [a_request(1)]
        assert script.prefetching == 0

    run(main())


@pytest.mark.parametrize(
    "prefetch", ["ends", WorkerGone("another life"), PagesMissing("m"), RequestError("r"), OutOfMemory("o")]
)
def test_outcome_of_a_prefetch_changes_nothing(prefetch: Exception | Literal["ends"]) -> None:
    script = Script(Act(prefetch=prefetch, produce_turns=3))
    undisturbed = Script(Act(produce_turns=3))
    pieces, reports = reported(script)
    assert pieces == pieces_of(undisturbed, a_request())
    assert reports == []
    assert (script.asks, script.calls) == (undisturbed.asks, undisturbed.calls)
    assert script.prefetched == undisturbed.prefetched == [a_request()]
    assert script.lost_workers == []


def test_prefetch_ends_with_the_prefill_worker() -> None:
    script = Script(Act(produce=WorkerGone("p")), Act(prefill=False))
    check_answer(pieces_of(script, a_request()), a_request())
    assert script.prefetched == [a_request()]
    assert script.prefetching == 0


def test_client_that_hangs_up_while_its_prompt_is_produced_leaves_nothing_running() -> None:
    async def main() -> None:
        script = Hold()
        pieces = list[StreamPiece]()
        first = asyncio.create_task(serve(a_request(), script, script, root_of, INFO, pieces.append))
        await script.begun.wait()
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        assert script.prefetching == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert [kind for kind, _ in script.calls] == ["produce"]

    run(main())


def test_bug_in_a_prefetch_is_reported_and_changes_no_answer() -> None:
    pieces, reports = reported(Script(Act(prefetch=AssertionError("a bug"), produce_turns=3)))
    check_answer(pieces, a_request())
    assert [str(error) for error in reports] == ["a bug"]
