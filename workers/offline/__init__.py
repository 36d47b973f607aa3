"""Answers without a server. Start at llm.py."""
