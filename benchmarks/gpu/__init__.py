"""Benchmarks of kernels and steps on a device."""
