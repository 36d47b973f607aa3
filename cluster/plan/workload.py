"""The load of a plan: requests of a trace, or at a rate with lengths, as `tidemill bench` would send them."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean

from tidemill.cluster.bench.load import timed
from tidemill.cluster.bench.workloads import RandomShape, generated
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest, read_trace, speed_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a trace, scaled to `request_rate` if that is given, or at that rate with the lengths of a
    shape."""

    trace: Path | None
    request_rate: float | None
    shape: RandomShape
    seed: int


def requests_of(load: Load, vocab_size: int) -> list[TraceRequest]:
    """Return the requests in the order of their arrival; equal seeds have the arrivals and lengths of
    `tidemill bench`. Raises TraceError."""
    if load.trace is not None:
        requests = read_trace(load.trace)[: load.shape.num_prompts]
        last_s = requests[-1].at_s
        if load.request_rate is None or not last_s:
            return requests
        return speed_up(requests, load.request_rate * last_s / len(requests))
    assert load.request_rate is not None, "a load without a trace has a rate"
    rng = Random(load.seed)  # noqa: S311  a seeded workload
    workload = timed(generated(rng, vocab_size, load.shape), rng, rate=load.request_rate)
    names = count()
    return [
        TraceRequest(
            item.at_s,
            len(item.tokens),
            item.max_tokens,
            tuple(next(names) for _ in range(-(-len(item.tokens) // BLOCK_TOKENS))),
        )
        for item in workload.items
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The least work of a load. `new_tokens` are those of each prompt that no earlier one has, `longest` is
    the longest request with its answer."""

    span_s: float
    new_tokens: tuple[int, ...]
    longest: int
    mean_prompt: float
    mean_context: float


def least_work_of(requests: list[TraceRequest]) -> LeastWork:
    """Return the work of requests that are sorted by arrival."""
    seen: set[int] = set()
    new_tokens: list[int] = []
    for request in requests:
        full = request.blocks[: request.full_blocks]
        hits = next((index for index, block in enumerate(full) if block not in seen), len(full))
        new_tokens.append(request.prompt_tokens - hits * BLOCK_TOKENS)
        seen.update(full)
    return LeastWork(
        span_s=requests[-1].at_s,
        new_tokens=tuple(new_tokens),
        longest=max(request.prompt_tokens + request.answer_tokens for request in requests),
        mean_prompt=mean(request.prompt_tokens for request in requests),
        mean_context=mean(request.prompt_tokens + request.answer_tokens / 2 for request in requests),
    )
