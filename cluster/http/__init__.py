"""The HTTP edge: the OpenAI API over a Service. Start at app.py."""
