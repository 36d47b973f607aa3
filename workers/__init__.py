"""One engine for prefill and decode, and the models it runs. Start at engine.py."""
