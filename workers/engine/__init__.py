"""The engine: it takes requests and runs steps. Start at `engine.py`."""
