"""Seeded workloads as plain data: which prompts are sent, and which of them wait for which.

Prompts are token ids drawn from the vocabulary of the served model, so that every run, and every server with
that vocabulary, computes the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

FIRST_TOKEN = 16
"""Smaller ids are special tokens in many vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. It is sent `pause_s` after the answer to the item of index `after`, or after the start.

    position counts the requests of its group from 0. The first `shared_tokens` of the prompt were in that
    of the request before it in the group. `hints` are fields of the body that say what to keep.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    group: int
    position: int
    shared_tokens: int
    after: int | None = None
    pause_s: float = 0.0
    hints: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    items: tuple[Item, ...]


def shared_prefix(
    rng: Random, vocab_size: int, *, groups: int = 8, prompts: int = 8, shared: int = 1024
) -> Workload:
    """Groups of prompts that start with the same `shared` tokens and end with 32 to 96 of their own.

    The second prompt of a group waits for the first, the rest for the second: one prompt makes the pages, the
    next finds out where it leaves them, which is where a hybrid model needs a checkpoint, the rest are warm.
    """
    items: list[Item] = []
    for group in range(groups):
        prefix = _tokens(rng, vocab_size, shared)
        first = len(items)
        items += [
            Item(
                tokens=prefix + _tokens(rng, vocab_size, rng.randrange(32, 97)),
                max_tokens=16,
                group=group,
                position=position,
                shared_tokens=shared if position else 0,
                after=None if position == 0 else first + min(position - 1, 1),
            )
            for position in range(prompts)
        ]
    return Workload("shared-prefix", tuple(items))


def multi_turn(rng: Random, vocab_size: int, *, conversations: int = 8, turns: int = 5) -> Workload:
    """Conversations whose prompts hold the whole history: a system prompt, questions, and answers.

    The answers in the history are scripted, not the model's own: each run sends the same tokens.
    """
    items: list[Item] = []
    system = _tokens(rng, vocab_size, 256)
    for conversation in range(conversations):
        history = system
        for turn in range(turns):
            history += _tokens(rng, vocab_size, rng.randrange(24, 120))
            items.append(
                Item(
                    tokens=history,
                    max_tokens=32,
                    group=conversation,
                    position=turn,
                    shared_tokens=len(items[-1].tokens) if turn else 0,
                    after=len(items) - 1 if turn else None,
                )
            )
            history += _tokens(rng, vocab_size, 32)
    return Workload("multi-turn", tuple(items))


def unique(rng: Random, vocab_size: int, *, prompts: int = 32) -> Workload:
    """Long prompts that have nothing in common: no cache can help."""
    return Workload(
        "unique",
        tuple(
            Item(
                tokens=_tokens(rng, vocab_size, rng.randrange(768, 1536)),
                max_tokens=64,
                group=group,
                position=0,
                shared_tokens=0,
            )
            for group in range(prompts)
        ),
    )


def burst(rng: Random, vocab_size: int, *, prompts: int = 128, shared: int = 1000) -> Workload:
    """Prompts with the same `shared` tokens and 32 to 96 of their own, all at the same moment: nothing is
    kept yet when they arrive. Run it with a concurrency of as many."""
    prefix = _tokens(rng, vocab_size, shared)
    return Workload(
        "burst",
        tuple(
            Item(
                tokens=prefix + _tokens(rng, vocab_size, rng.randrange(32, 97)),
                max_tokens=4,
                group=0,
                position=position,
                shared_tokens=shared if position else 0,
            )
            for position in range(prompts)
        ),
    )


def agents(
    rng: Random,
    vocab_size: int,
    *,
    families: int = 2,
    sessions: int = 4,
    turns: int = 8,
    shared: int = 1024,
    strangers: int = 32,
) -> Workload:
    """Sessions of agents, and prompts of strangers that come once while the agents wait for their tools.

    A family shares a system prompt and tools of `shared` tokens. A turn adds 64 to 191 tokens: the answer
    before it, scripted, and the result of a tool. Pauses are log-normal, with a median of 1 s and the same
    spread as those of `tidemill simulate agents`. Hints mark the end of the shared part and name the session.
    """
    items: list[Item] = []
    group = 0
    for _ in range(families):
        system = _tokens(rng, vocab_size, shared)
        for _ in range(sessions):
            history = system
            for turn in range(turns):
                history += _tokens(rng, vocab_size, rng.randrange(64, 192))
                items.append(
                    Item(
                        tokens=history,
                        max_tokens=8,
                        group=group,
                        position=turn,
                        shared_tokens=len(items[-1].tokens) if turn else 0,
                        after=len(items) - 1 if turn else None,
                        pause_s=rng.lognormvariate(0.0, 1.2),
                        hints={"session_id": f"agent-{group}", "cache_breakpoints": [shared]},
                    )
                )
            group += 1
    items += [
        Item(
            tokens=_tokens(rng, vocab_size, 1024),
            max_tokens=8,
            group=group + stranger,
            position=0,
            shared_tokens=0,
            pause_s=rng.uniform(0.0, 2.0 * turns),
        )
        for stranger in range(strangers)
    ]
    return Workload("agents", tuple(items))


WORKLOADS: dict[str, Callable[[Random, int], Workload]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "unique": unique,
    "burst": burst,
    "agents": agents,
}


def _tokens(rng: Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count))
