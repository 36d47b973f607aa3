"""Elastic memory: layout, keys, arena, ledger, prefix index, page stores. Start at layout.py."""
