"""Compiled operators, once per session, and memory that is NaN until it is written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tidemill.kernels.dispatch import REFERENCE, Operators, operators


@pytest.fixture(scope="session")
def cpu(kernel_cache: Path) -> Operators:
    return operators("cpu", kernel_cache)


@pytest.fixture
def reference() -> Operators:
    return REFERENCE


@pytest.fixture(scope="session")
def half_cpu(kernel_cache: Path) -> Operators:
    """Operators whose products are in bfloat16."""
    return operators("cpu", kernel_cache, "bfloat16")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every tensor that an operator allocates starts as NaN: an element left unwritten shows."""
    torch.use_deterministic_algorithms(mode=True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors, and tests that compare with two threads say so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
