"""The serving cluster. Start at `edge/flow.py`, the life of a request."""
