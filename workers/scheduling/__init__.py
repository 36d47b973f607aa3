"""Choose the rows of the next step, and the request that gets memory next."""
