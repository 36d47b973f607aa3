"""Tensor parallelism: how weights are cut, what the ranks of a group exchange, how the group lives."""
