"""Benchmarks of the router and placement."""
