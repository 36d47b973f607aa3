"""Which rows the next step computes, and which request gets memory next."""
