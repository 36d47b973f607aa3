"""Benchmarks of page stores."""
