"""Drain a worker: each stream runs to a depth where it can be resumed, and ends when that depth is stored.

order     page boundary: kept, published            stored: ends here
...|---------------|------------------------------------|
   `-- the stream goes on: elsewhere it resumes at the boundary, and computes what it drew after it
"""

from collections.abc import Callable, Iterable

from tidemill.workers.engine.publisher import Publisher
from tidemill.workers.messages import HandedOver
from tidemill.workers.scheduling.sequence import Sequence

WITHIN_S = 20.0
"""The time limit of a stream. What is not stored by then is computed again elsewhere."""


class Drain:
    """Ends the work that a worker should leave to others. `end` takes the memory of a running sequence and
    ends its stream with an error."""

    def __init__(self, publisher: Publisher, end: Callable[[Sequence, Exception], None]) -> None:
        self._publisher = publisher
        self._end = end
        self._produces = True
        self._generates = True
        self._until_s = 0.0
        self._cuts: dict[str, int] = {}  # the depth where each stream can be resumed
        self._offered: set[str] = set()

    def restrict(self, *, produces: bool, generates: bool, now_s: float) -> None:
        """Allow only the given kinds of work from now on."""
        self._produces, self._generates = produces, generates
        self._until_s = now_s + WITHIN_S
        self._cuts.clear()
        self._offered.clear()

    def takes(self, *, produces: bool, pools: bool = False) -> bool:
        """Return whether this kind of work is allowed. What pools runs where either of the others does."""
        if pools:
            return self._produces or self._generates
        return self._produces if produces else self._generates

    def check(self, *, produces: bool, pools: bool = False) -> None:
        """Raise HandedOver if this kind of work is not allowed."""
        if not self.takes(produces=produces, pools=pools):
            raise _handed_over()

    def advance(self, running: Iterable[Sequence], now_s: float) -> None:
        """End the streams that can be resumed elsewhere. Call it between two steps."""
        if self._produces and self._generates:
            return
        for sequence in list(running):
            if not self.takes(produces=sequence.produces, pools=sequence.request.pools) and (
                now_s >= self._until_s or (sequence.streams and self._is_stored(sequence))
            ):
                self._cuts.pop(sequence.id, None)
                self._offered.discard(sequence.id)
                self._end(sequence, _handed_over())

    def _is_stored(self, sequence: Sequence) -> bool:
        size = sequence.page_tokens
        cut = self._cuts.get(sequence.id)
        if cut is None:
            cut = self._cuts[sequence.id] = (sequence.launched // size + 1) * size
            sequence.restore.cuts.add(cut)
        if sequence.computed < cut:
            return False
        if sequence.id not in self._offered:
            self._publisher.publish(sequence, cut // size)
            if sequence.delivery.publication.task is not None:  # otherwise too many are in progress
                self._offered.add(sequence.id)
            return False
        return sequence.delivery.publication.task is None


def _handed_over() -> HandedOver:
    return HandedOver("the worker was ordered to leave this work to others")
