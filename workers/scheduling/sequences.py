"""The sequences of a worker. Running ones have memory, waiting ones need it. The engine moves them."""

from collections.abc import Iterator

from tidemill.workers.scheduling.sequence import Sequence


class Sequences:
    def __init__(self) -> None:
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}
        self.closed = False  # the step loop has ended: nothing would run an admitted sequence

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.running.values(), *self.waiting.values()])

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def youngest(self) -> Sequence:
        """The running sequence that is preempted first."""
        return max(self.running.values(), key=lambda sequence: sequence.seniority)

    @property
    def num_with_memory(self) -> int:
        """The sequences that run, or whose pages are being fetched."""
        return len(self.running) + sum(sequence.lease is not None for sequence in self.waiting.values())

    def older_than(self, sequence: Sequence) -> list[Sequence]:
        return [other for other in self if other.seniority < sequence.seniority]

    def wait(self, sequence: Sequence) -> None:
        self.running.pop(sequence.id, None)
        self.waiting[sequence.id] = sequence

    def run(self, sequence: Sequence) -> None:
        self.waiting.pop(sequence.id, None)
        self.running[sequence.id] = sequence

    def drop(self, sequence: Sequence) -> None:
        self.running.pop(sequence.id, None)
        self.waiting.pop(sequence.id, None)
