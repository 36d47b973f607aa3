"""Seeded workloads, the bundled model's training, and measurements; never installed."""
