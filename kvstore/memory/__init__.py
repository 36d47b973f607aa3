"""The memory of one worker: arena, ledger, prefix index, eviction. Start at `ledger.py`."""
