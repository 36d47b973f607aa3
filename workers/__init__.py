"""The engine of a worker: scheduling, execution, transfer and models."""
