"""The failures of a tensor-parallel group."""

from tidemill.workers.messages import WorkerGone


class GroupBroken(WorkerGone):
    """A rank is gone, or the ranks have lost each other. It is final: the leader ends, and starts a new group
    in its next incarnation. Other workers take over its requests."""
