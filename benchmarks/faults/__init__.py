"""Measures the cost of faults in a server's processes, memory and clients: `python -m benchmarks.faults`."""
