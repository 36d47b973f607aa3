"""Load generators, evaluations and libraries of others, unmodified, each with an environment of its own."""
