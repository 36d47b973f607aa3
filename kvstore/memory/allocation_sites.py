"""Allocations of the ledger: the demand of a lease, and the sites where tests refuse memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat


class AllocationSite(Enum):
    """The purpose of an allocation. Tests refuse memory at each of them."""

    RUN_PAGE = "a page for tokens to run"
    RUN_WINDOW = "a window page for tokens to run"
    RUN_STATE = "the slot that the next step writes"
    SPARE_STATE = "the second slot of the strategy `double`"
    SCRATCH_STATE = "a slot for a draft that may be rejected"
    CHECKPOINT_STATE = "a slot to continue in when the state becomes a checkpoint: optional"


FailAllocation = Callable[[AllocationSite], bool]
"""A test hook, called before each allocation of the ledger; on True the allocation fails."""


def never(_: AllocationSite) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Demand:
    """Numbers of objects. State slots are listed by the site that needs them."""

    pages: int = 0
    windows: int = 0
    slots: tuple[AllocationSite, ...] = ()

    def sites(self) -> Iterator[AllocationSite]:
        """Yield the site of each object."""
        run_windows = repeat(AllocationSite.RUN_WINDOW, self.windows)
        return chain(self.slots, run_windows, repeat(AllocationSite.RUN_PAGE, self.pages))


NOTHING = Demand()
