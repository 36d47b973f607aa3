"""Pages, states and windows: where their bytes lie, who owns them, and the stores that share them."""
