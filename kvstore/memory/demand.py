"""The memory that a lease lacks, by class, and the allocations that tests refuse."""

from collections.abc import Callable, Mapping

Demand = Mapping[str, int]
"""Numbers of objects by class."""

NOTHING: Demand = {}

CHECKPOINT_STATE = "a slot to continue in when the state becomes a checkpoint: optional"

FailAllocation = Callable[[str], bool]
"""A test hook, called before each allocation of the ledger, with its class or with CHECKPOINT_STATE. On True
the allocation fails."""


def never(_: str) -> bool:
    return False
