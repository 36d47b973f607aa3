"""Logs, traces and redaction of secrets."""
