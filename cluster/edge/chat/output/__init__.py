"""Convert tokens to text, reasoning and tool calls."""
