"""Benchmarks of a whole server over HTTP."""
