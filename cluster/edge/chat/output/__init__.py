"""From tokens to text, reasoning and tool calls."""
