"""The outcome of a run, and its figures: means are over virtual time. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.memory.served_model import COST

FULL = 0.99
"""The share of the budget at which the memory counts as full."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory at the start of a step; `slots` are the unshared states of requests."""

    at_s: float
    running: int
    slots: int
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    prompts     the length of each prompt in tokens
    reused      the tokens of each prompt that were in memory when it was first admitted
    """

    makespan_s: float
    output_tokens: int
    prompts: list[int]
    reused: list[int]
    counters: dict[str, int]
    preemptions_max: int
    samples: list[Sample]

    def figures(self) -> dict[str, float]:
        return {
            "in_flight_mean": self._mean(lambda sample: sample.running),
            "in_flight_max": max(sample.running for sample in self.samples),
            "output_tokens_per_s": self.output_tokens / self.makespan_s,
            "makespan_s": self.makespan_s,
            "token_hit_rate": sum(self.reused) / sum(self.prompts),
            "flops_saved_rate": _flops(self.reused) / _flops(self.prompts),
            "preemptions": self.counters.get("preemptions", 0),
            "preemptions_of_one_request_max": self.preemptions_max,
            "usage_mean": self._mean(lambda sample: usage(sample.memory)),
            "time_full": self._mean(lambda sample: usage(sample.memory) >= FULL),
            "slots_per_row": self._mean(lambda sample: sample.slots)
            / self._mean(lambda sample: sample.running),
            "checkpoints_skipped": self.counters.get("checkpoints_skipped", 0),
            "dead_ends": self.counters.get("dead_ends", 0),
            "hit_without_state_tokens": self.counters.get("kv_hit_without_state_tokens", 0),
        }

    def _mean(self, value: Callable[[Sample], float]) -> float:
        ends = [*(sample.at_s for sample in self.samples[1:]), self.makespan_s]
        weighted = sum(
            value(sample) * (end - sample.at_s) for sample, end in zip(self.samples, ends, strict=True)
        )
        return weighted / (self.makespan_s - self.samples[0].at_s)


def usage(memory: Mapping[str, int]) -> float:
    """Return the share of the budget that has pinned or cached objects."""
    left = memory["free"] + memory["empty"] + memory["unmapped"]
    return 1 - left / sum(memory.values())


def _flops(lengths: list[int]) -> float:
    return sum(COST.flops(0, length) for length in lengths)
