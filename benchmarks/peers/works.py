"""Works for the servers compared: streams, prompts, conversations, and prompts that share a prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tidemill.cluster.bench.workloads import Item, from_prompts

VOCAB = 8192
FIRST_ID = 300  # smaller ids are special tokens and single bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One measurement. `metric` is what is compared, in seconds: wall time, the median of times to the first
    token, or that of each request's mean time between tokens. First tokens are those of the turns of a
    conversation from `from_turn` on, counted from 0."""

    name: str
    items: tuple[Item, ...]
    concurrency: int
    metric: str = "wall_s"
    from_turn: int = 0


def drawn(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, VOCAB) for _ in range(length))


def items_of(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[Item, ...]:
    return from_prompts("", prompts, max_tokens).items


def conversations(rng: Random, count: int, first: int, growth: Sequence[int]) -> tuple[Item, ...]:
    """Return conversations whose prompts have `first` tokens, and grow by `growth` from turn to turn.
    Random tokens stand in for the answers."""
    items: list[Item] = []
    for group in range(count):
        prompt = drawn(rng, first)
        for turn, more in enumerate((*growth, 0)):
            after = len(items) - 1 if turn else None
            items.append(
                Item(tokens=prompt, max_tokens=48, group=group, position=turn, shared_tokens=0, after=after)
            )
            prompt += drawn(rng, more)
    return tuple(items)


AGENT_TOKENS = 24_000
AGENT_GROWTH = (180, 1_600, 240, 900, 420)
"""The prompt of an agent's first turn, and what calls and results of tools add: a listing, a file, an edit, a
run of tests, another edit."""


FAMILIES = (
    (4, 4, 2400, 32, 4),
    (3, 4, 2400, 8, 1),
    (3, 4, 1024, 8, 1),
    (8, 8, 1024, 8, 8),
    (4, 4, 512, 32, 4),
    (4, 4, 1400, 32, 4),
)
"""Families, prompts of each, shared tokens, tokens of an answer, and prompts at a time."""


def family_work(
    rng: Random, families: int, prompts: int, shared: int, max_tokens: int, concurrency: int
) -> Work:
    """Return prompts that share a prefix in each family and end with 128 tokens of their own."""
    prefixes = [drawn(rng, shared) for _ in range(families)]
    return Work(
        name=f"{families} x {prompts} x ({shared:,} + 128), c={concurrency}",
        items=items_of([prefix + drawn(rng, 128) for prefix in prefixes for _ in range(prompts)], max_tokens),
        concurrency=concurrency,
    )


def works_of(seed: int) -> list[Work]:
    """Return every work with prompts that no earlier seed has sent."""
    rng = Random(seed)
    works = [
        Work(
            name=f"c={streams}",
            items=items_of([drawn(rng, 128) for _ in range(max(4, streams))], 64),
            concurrency=streams,
        )
        for streams in (1, 8, 32, 128)
    ]
    first = items_of([drawn(rng, 2048) for _ in range(5)], 1)
    works.append(Work(name="first token of 2,048", items=first, concurrency=1, metric="ttft_s"))
    long = items_of([drawn(rng, 8000) for _ in range(4)], 64)
    works.append(Work(name="four prompts of 8,000", items=long, concurrency=4))
    works.append(Work(name="four conversations", items=conversations(rng, 4, 700, [348] * 5), concurrency=4))
    works += [family_work(rng, *family) for family in FAMILIES]
    tokens = items_of([drawn(rng, 128) for _ in range(4)], 64)
    works.append(Work(name="decode, 1 stream", items=tokens, concurrency=1, metric="tpot_s"))
    session = conversations(rng, 1, AGENT_TOKENS, AGENT_GROWTH)
    works.append(Work(name="agent session", items=session, concurrency=1, metric="ttft_s", from_turn=1))
    return works


def shown(seconds: float) -> str:
    return f"{seconds:.{1 if seconds >= 10 else 2 if seconds >= 0.2 else 4}f}"


METRICS = {work.name: work.metric for work in works_of(0)}
