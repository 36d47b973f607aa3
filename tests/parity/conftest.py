"""Compiled operators, once per session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tidemill.kernels.dispatch import Operators, operators


@pytest.fixture(scope="session")
def cpu(kernel_cache: Path) -> Operators:
    return operators("cpu", kernel_cache)


@pytest.fixture(scope="session")
def half_cpu(kernel_cache: Path) -> Operators:
    """Operators whose products are in bfloat16."""
    return operators("cpu", kernel_cache, "bfloat16")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread for small models; the test that compares with two threads sets them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
