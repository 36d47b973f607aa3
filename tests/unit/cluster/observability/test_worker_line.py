"""The log line of a worker: rates between two loads, and silence while an idle worker does not change."""

import asyncio
import logging
from dataclasses import replace

import pytest

from tidemill.cluster.observability import worker_line
from tidemill.cluster.observability.worker_line import WorkerLine, line_of
from tidemill.workers.messages import NO_MEMORY, WorkerLoad

MIB = 1 << 20
IDLE = WorkerLoad(
    memory=NO_MEMORY | {"pages_cached": 3 * MIB, "free": MIB},
    budget_bytes=64 * MIB,
    state_slots=0,
    counters={"steps": 5.0, "generated_tokens": 100.0, "computed_tokens": 40.0},
)
BUSY = replace(
    IDLE,
    running_rows=3,
    waiting_rows=2,
    memory=NO_MEMORY | {"pages_live": 2 * MIB, "pages_cached": MIB, "states_live": MIB // 2},
    counters={
        **IDLE.counters,
        "steps": 900.0,
        "generated_tokens": 350.0,
        "computed_tokens": 1040.0,
        "prefix_queried_tokens": 640.0,
        "prefix_resumed_tokens": 160.0,
    },
)


def test_line_has_rates_of_the_interval() -> None:
    assert line_of(IDLE, BUSY, 10.0) == (
        "prompt throughput: 100.0 tokens/s, generation throughput: 25.0 tokens/s, running: 3 reqs,"
        " waiting: 2 reqs, memory: pages 2.0 live + 1.0 cached, states 0.5 live + 0.0 cached of 64.0 MiB,"
        " prefix cache hit rate: 25.0%"
    )


def test_idle_worker_is_silent_though_it_steps() -> None:
    assert line_of(IDLE, replace(IDLE, counters=IDLE.counters | {"steps": 77.0}), 10.0) is None
    assert line_of(IDLE, replace(IDLE, budget_bytes=32 * MIB), 10.0) is not None
    assert line_of(BUSY, IDLE, 10.0) is not None


def test_worker_whose_requests_stand_still_is_not_silent() -> None:
    line = line_of(BUSY, BUSY, 10.0)
    assert line is not None
    assert "generation throughput: 0.0 tokens/s, running: 3 reqs" in line
    assert line.endswith("hit rate: -")


def test_lines_come_until_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_line, "LINE_S", 0.0)
    loads = iter([IDLE, IDLE, BUSY])

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            lines = tasks.create_task(WorkerLine("decode-0", lambda: next(loads, IDLE)).run())
            while len(caplog.records) < 2:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0)
            lines.cancel()

    with caplog.at_level(logging.INFO, worker_line.log.name):
        asyncio.run(main())
    busy, idle = (record.message for record in caplog.records[:2])
    assert busy.startswith("decode-0: prompt throughput: ")
    assert "running: 3 reqs" in busy
    assert "running: 0 reqs" in idle
