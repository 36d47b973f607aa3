"""What a tensor-parallel group can come to."""

from tidemill.workers.messages import WorkerGone


class GroupBroken(WorkerGone):
    """A rank is gone, or the ranks have lost each other. Nothing mends it: the leader ends, and starts a new
    group in its next life. What was asked of the group is asked elsewhere."""
