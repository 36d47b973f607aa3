"""Benchmarks of the memory of a worker."""
