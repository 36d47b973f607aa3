"""Ray prints nothing to the standard output of a server."""

from typing import Any

import pytest
import ray._private.worker

from tidemill.cluster.processes.supervisor_client import PRINT, keep_stdout

RAY_WORKER: Any = ray._private.worker


def test_ray_prints_nothing_to_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RAY_WORKER, "print_to_stdstream", PRINT)
    keep_stdout()
    message = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    RAY_WORKER.print_to_stdstream(message, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert "A worker died" in err
