"""The engine takes requests and runs steps. Start at `engine.py`."""
