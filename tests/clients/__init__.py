"""Load generators and evaluations of others, unmodified, each with an environment of its own."""
