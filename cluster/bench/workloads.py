"""Seeded workloads as plain data: which prompts are sent, and which of them wait for which.

Prompts are token ids drawn from the vocabulary of the served model, so that every run, and every server with
that vocabulary, computes the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any

FIRST_TOKEN = 16
"""Smaller ids are special tokens in many vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. It is sent `pause_s` after the answer to the item of index `after`, or `at_s` after the
    start.

    position counts the requests of its group from 0. The first `shared_tokens` of the prompt were in that
    of the request before it in the group. `hints` are fields of the body that name what to keep. `cuts` are
    the depths where the messages of a chat after the first begin, by user and assistant in turn. A prompt is
    `text` or, if that is empty, `tokens`.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    max_tokens: int
    group: int
    position: int
    shared_tokens: int
    after: int | None = None
    pause_s: float = 0.0
    at_s: float = 0.0
    hints: Mapping[str, object] = field(default_factory=dict[str, object])
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests; if `is_timed` the first ones of each group have their own arrivals."""

    name: str
    items: tuple[Item, ...]
    is_timed: bool = False


def _size(default: float, text: str, least: int = 1) -> Any:  # noqa: ANN401  as dataclasses has it
    """Return a field of a shape: its default, the help of its option, and its least value."""
    return field(default=default, metadata={"text": text, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    num_prompts: int = 1000
    input_len: int = _size(1024, "tokens of a prompt")
    output_len: int = _size(128, "tokens of an answer")
    range_ratio: float = _size(0.0, "lengths vary by this part of them, up and down", 0)
    prefix_len: int = _size(0, "tokens that all prompts begin with", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GspShape:
    num_groups: int = _size(64, "number of system prompts")
    prompts_per_group: int = _size(16, "prompts that share one")
    system_prompt_len: int = _size(2048, "tokens of a system prompt")
    question_len: int = _size(128, "tokens of a prompt after it")
    output_len: int = _size(256, "tokens of an answer")
    range_ratio: float = _size(1.0, "lengths vary from this part of them to all", 0)
    ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnShape:
    num_conversations: int = _size(8, "number of conversations")
    num_turns: int = _size(5, "questions of each")
    system_prompt_len: int = _size(256, "tokens that all conversations begin with", 0)
    question_len: int = _size(72, "mean tokens of a question")
    output_len: int = _size(32, "tokens of an answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsShape:
    num_families: int = _size(2, "system prompts of agents")
    num_sessions: int = _size(4, "sessions that share one")
    num_turns: int = _size(8, "turns of a session")
    system_prompt_len: int = _size(1024, "tokens of a system prompt with its tools")
    output_len: int = _size(8, "tokens of an answer")
    num_strangers: int = _size(32, "prompts that come once meanwhile", 0)


def random_prompts(rng: Random, vocab_size: int, shape: RandomShape) -> Workload:
    """Prompts with nothing in common but their first `prefix_len` tokens.

    Lengths are uniform in `length * (1 - range_ratio)` to `length * (1 + range_ratio)`, as in vLLM.
    """

    def length(middle: int) -> int:
        return rng.randint(
            max(1, int(middle * (1 - shape.range_ratio))), max(1, ceil(middle * (1 + shape.range_ratio)))
        )

    prefix = drawn_tokens(rng, vocab_size, shape.prefix_len)
    return Workload(
        "random",
        tuple(
            Item(
                tokens=prefix + drawn_tokens(rng, vocab_size, length(shape.input_len)),
                max_tokens=length(shape.output_len),
                group=0 if prefix else number,
                position=number if prefix else 0,
                shared_tokens=shape.prefix_len if number else 0,
            )
            for number in range(shape.num_prompts)
        ),
    )


def gsp(rng: Random, vocab_size: int, shape: GspShape) -> Workload:
    """Groups of prompts that start with the same system prompt: SGLang's `generated-shared-prefix`.

    Lengths are uniform in `length * range_ratio` to `length`. All groups are shuffled if not `ordered`.
    """

    def length(most: int) -> int:
        return rng.randint(max(1, int(most * shape.range_ratio)), most)

    systems = [
        drawn_tokens(rng, vocab_size, length(shape.system_prompt_len)) for _ in range(shape.num_groups)
    ]
    groups = [group for group in range(shape.num_groups) for _ in range(shape.prompts_per_group)]
    if not shape.ordered:
        rng.shuffle(groups)
    sent = [0] * shape.num_groups
    items: list[Item] = []
    for group in groups:
        items.append(
            Item(
                tokens=systems[group] + drawn_tokens(rng, vocab_size, length(shape.question_len)),
                max_tokens=length(shape.output_len),
                group=group,
                position=sent[group],
                shared_tokens=len(systems[group]) if sent[group] else 0,
            )
        )
        sent[group] += 1
    return Workload("gsp", tuple(items))


def multi_turn(rng: Random, vocab_size: int, shape: MultiTurnShape) -> Workload:
    """Conversations whose prompts hold the whole history: a system prompt, questions, and answers.

    A question has a third to five thirds of `question_len` tokens. The answers in the history are scripted,
    not the model's own: each run sends the same tokens.
    """
    items: list[Item] = []
    system = drawn_tokens(rng, vocab_size, shape.system_prompt_len)
    for conversation in range(shape.num_conversations):
        history, cuts = system, tuple[int, ...]()
        for turn in range(shape.num_turns):
            asked = rng.randint(max(1, shape.question_len // 3), max(1, shape.question_len * 5 // 3))
            history += drawn_tokens(rng, vocab_size, asked)
            items.append(_turn(items, turn, history, shape.output_len, conversation, cuts=cuts))
            answered = history + drawn_tokens(rng, vocab_size, shape.output_len)
            cuts = (*cuts, len(history), len(answered))
            history = answered
    return Workload("multi-turn", tuple(items))


def _turn(
    items: Sequence[Item],
    turn: int,
    history: tuple[int, ...],
    max_tokens: int,
    group: int,
    **more: Any,  # noqa: ANN401  fields of Item
) -> Item:
    """Return a turn of a conversation, of which `items` has the one before as its last."""
    return Item(
        tokens=history,
        max_tokens=max_tokens,
        group=group,
        position=turn,
        shared_tokens=len(items[-1].tokens) if turn else 0,
        after=len(items) - 1 if turn else None,
        **more,
    )


def agents(rng: Random, vocab_size: int, shape: AgentsShape) -> Workload:
    """Sessions of agents, and prompts of strangers that come once while the agents wait for their tools.

    A family of `num_sessions` shares its system prompt and tools. A turn adds 64 to 191 tokens: the answer
    before it, scripted, and the result of a tool. Pauses are log-normal, with a median of 1 s and the same
    spread as those of `tidemill simulate agents`. Hints mark the end of the shared part and name the session.
    """
    items: list[Item] = []
    group = 0
    for _ in range(shape.num_families):
        system = drawn_tokens(rng, vocab_size, shape.system_prompt_len)
        ends = [shape.system_prompt_len]
        for _ in range(shape.num_sessions):
            history = system
            for turn in range(shape.num_turns):
                history += drawn_tokens(rng, vocab_size, rng.randrange(64, 192))
                pause_s = rng.lognormvariate(0.0, 1.2)
                hints = {"session_id": f"agent-{group}", "cache_breakpoints": ends}
                at = (items, turn, history, shape.output_len, group)
                items.append(_turn(*at, pause_s=pause_s, hints=hints))
            group += 1
    items += [
        Item(
            tokens=drawn_tokens(rng, vocab_size, shape.system_prompt_len),
            max_tokens=shape.output_len,
            group=group + stranger,
            position=0,
            shared_tokens=0,
            pause_s=rng.uniform(0.0, 2.0 * shape.num_turns),
        )
        for stranger in range(shape.num_strangers)
    ]
    return Workload("agents", tuple(items))


def from_prompts(name: str, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Workload:
    """Return a workload of these prompts, which share nothing that is counted."""
    return Workload(
        name,
        tuple(
            Item(tokens=prompt, max_tokens=max_tokens, group=number, position=0, shared_tokens=0)
            for number, prompt in enumerate(prompts)
        ),
    )


def drawn_tokens(rng: Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count))


SHAPES = {"random": RandomShape, "gsp": GspShape, "multi-turn": MultiTurnShape, "agents": AgentsShape}
Shape = RandomShape | GspShape | MultiTurnShape | AgentsShape


def generated(rng: Random, vocab_size: int, shape: Shape) -> Workload:
    match shape:
        case RandomShape():
            return random_prompts(rng, vocab_size, shape)
        case GspShape():
            return gsp(rng, vocab_size, shape)
        case MultiTurnShape():
            return multi_turn(rng, vocab_size, shape)
        case AgentsShape():
            return agents(rng, vocab_size, shape)
