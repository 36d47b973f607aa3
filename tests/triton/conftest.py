"""These tests run only under TRITON_INTERPRET=1, which Triton reads at its first import: in a separate pytest
run."""

import os

from tests.unit.kernels.conftest import poisoned

__all__ = ["poisoned"]

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.triton import interpreter

    interpreter.compute_bfloat16()
else:
    collect_ignore_glob = ["test_*.py"]
