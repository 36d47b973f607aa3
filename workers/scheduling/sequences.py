"""The sequences of a worker. Running ones have memory, waiting ones need it. The engine moves them."""

from collections.abc import Iterator

from tidemill.workers.scheduling.admission_queue import Precedence
from tidemill.workers.scheduling.sequence import Sequence

STEPS_AVERAGED = 16
"""The number of steps over which the time of a prompt token is averaged."""


class Sequences:
    def __init__(self) -> None:
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}
        self._token_s = 0.0  # the time of a prompt token, by which prompts are ordered
        self._prompt_tokens, self._prompt_s = 0.0, 0.0  # of recent steps
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

    def precedence(self, sequence: Sequence, depth: int = 0) -> Precedence:
        """Return the sort key of a prompt that resumes at `depth` or further."""
        return sequence.precedence(max(depth, sequence.launched), self._token_s)

    def tokens_before(self, precedence: Precedence) -> int:
        """Return the prompt tokens that running sequences launch before a prompt of this precedence."""
        return sum(
            sequence.target - sequence.launched
            for sequence in self.running.values()
            if sequence.launched < sequence.target and self.precedence(sequence) < precedence
        )

    def computed_prompts(self, num_tokens: int, seconds: float) -> None:
        """Record a step that ran prompts. The time of a prompt token changes only when it is off by a factor
        of two: equal prompts keep their order."""
        self._prompt_tokens += num_tokens - self._prompt_tokens / STEPS_AVERAGED
        self._prompt_s += seconds - self._prompt_s / STEPS_AVERAGED
        measured_s = self._prompt_s / self._prompt_tokens
        if not measured_s / 2 < self._token_s < measured_s * 2:
            self._token_s = measured_s

    def wait(self, sequence: Sequence) -> None:
        self.running.pop(sequence.id, None)
        self.waiting[sequence.id] = sequence

    def run(self, sequence: Sequence) -> None:
        self.waiting.pop(sequence.id, None)
        self.running[sequence.id] = sequence

    def drop(self, sequence: Sequence) -> None:
        self.running.pop(sequence.id, None)
        self.waiting.pop(sequence.id, None)
