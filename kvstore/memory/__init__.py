"""The memory of one worker: arena, ledger, prefix index and eviction. Start at `ledger.py`."""
