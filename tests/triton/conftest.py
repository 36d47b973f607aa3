"""Only under TRITON_INTERPRET=1, which Triton reads when it is first imported: a pytest run of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.triton import interpreter

    interpreter.compute_bfloat16()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every tensor that an operator allocates starts as NaN: an element left unwritten shows."""
    torch.use_deterministic_algorithms(mode=True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "kernels"
