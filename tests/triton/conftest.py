"""Only under TRITON_INTERPRET=1, which Triton reads when it is first imported: a pytest run of their own."""

import os

from tests.unit.kernels.conftest import kernel_cache, poisoned

__all__ = ["kernel_cache", "poisoned"]

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.triton import interpreter

    interpreter.compute_bfloat16()
else:
    collect_ignore_glob = ["test_*.py"]
