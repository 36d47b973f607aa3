"""Compiled operators, once per session, and one thread for small models."""

from tests.unit.kernels.conftest import cpu, half_cpu, one_thread

__all__ = ["cpu", "half_cpu", "one_thread"]
