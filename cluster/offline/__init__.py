"""`tidemill.LLM`: answers in this process, without a server."""
