"""The process that clients talk to. `flow.py` is the life of one request."""
