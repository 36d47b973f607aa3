"""The contract of an engine: `engine.py` is what any engine is, ours or that of an adapter."""
