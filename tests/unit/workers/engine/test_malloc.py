"""Memory that a step frees stays with the process: the next step does not fault its pages in again."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from tidemill.workers.engine.malloc import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
for _ in range(10):
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(1 << 24)  # 64 MiB: 16,384 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("keeps", "is_kept"), [(True, True), (False, False)])
def test_freed_memory_is_kept(keeps: bool, is_kept: bool) -> None:  # noqa: FBT001  a case
    script = SCRIPT.format(keeps=keeps)
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert (int(found.stdout) < 2000) is is_kept
