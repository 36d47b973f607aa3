"""The page stores that workers share. Start at `page_store.py`."""
