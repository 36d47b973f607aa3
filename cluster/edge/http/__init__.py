"""The OpenAI-compatible HTTP API, the operator API and the dashboard files."""
