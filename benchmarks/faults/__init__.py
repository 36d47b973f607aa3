"""What faults of a server's processes, memory and clients cost: `python -m benchmarks.faults`."""
