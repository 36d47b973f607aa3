"""The progress of a cluster start: bars on a terminal, few log lines elsewhere."""

import logging
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console

from tidemill.cluster.processes.start_progress import show_progress
from tidemill.cluster.worker.worker_process import Failed, Loading, Ready

READY = Ready(cast("Any", None))


def test_progress_logs_loaded_bytes_at_most_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, now_s = StringIO(), 0.0
    with caplog.at_level(logging.INFO, "tidemill"), show_progress(Console(file=out), lambda: now_s) as show:
        show("Ray", Loading(0, 0))
        show("Ray", None)
        show("prefill-0", Loading(0, 0))
        now_s = 9.9
        show("prefill-0", Loading(1_000_000, 8_000_000))
        assert not caplog.messages
        now_s = 10.0
        show("decode-0", Loading(2_000_000, 8_000_000))
        now_s = 19.9
        show("decode-0", Loading(3_000_000, 8_000_000))
        show("prefill-0", READY)
        now_s = 20.0
        show("decode-0", Loading(4_000_000, 1_234_000_000))
        show("decode-0", Failed("no memory", expected=True))
        now_s = 40.0
        show("prefill-0", READY)
    assert not out.getvalue(), "progress goes to the log, not to the console"
    assert caplog.messages == [
        "loading weights: prefill-0 1 of 8 MB, decode-0 2 of 8 MB",
        "loading weights: decode-0 4 of 1,234 MB",
    ]


def test_progress_bars_disappear_at_the_end() -> None:
    out = StringIO()
    with show_progress(Console(file=out, force_terminal=True, width=120), lambda: 0.0) as show:
        show("Ray", Loading(0, 0))
        show("Ray", None)
        show("decode-0", Loading(500_000_000, 8_000_000_000))
        show("decode-0", READY)
        show("decode-1", Failed("no memory", expected=True))
    text = out.getvalue()
    assert "decode-1" in text
    assert "failed" in text
    assert "Ray" not in text.rpartition("decode-1")[0][-400:]
    assert not text.endswith("failed\n"), "the bars stay"
