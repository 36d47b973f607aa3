"""Benchmarks of engine and its models."""
