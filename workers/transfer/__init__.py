"""Move pages and checkpoints between worker memory and the page store."""
