"""Tensor parallelism: the group, its ranks and the link between them."""
