"""The places where the ledger allocates."""

from enum import Enum


class AllocationSite(Enum):
    """Tests refuse memory at each of them."""

    RUN_PAGE = "a page for tokens to run"
    RUN_WINDOW = "a window page for tokens to run"
    RUN_STATE = "the slot that the next step writes"
    SPARE_STATE = "the second slot of the strategy `double`"
    SCRATCH_STATE = "a slot for a draft that may be rejected"
    CHECKPOINT_STATE = "a slot to go on in when the state becomes a checkpoint: optional"


def never(_: AllocationSite) -> bool:
    return False
