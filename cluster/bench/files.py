"""Workloads from files: conversations in the format of ShareGPT, and request traces."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from tidemill.cluster.bench.workloads import Item, Workload, drawn_tokens
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest, read_trace
from tidemill.kvstore.errors import TidemillError

TOKEN_CHARACTERS = 4
"""The length of an answer in tokens is estimated by it: the client has no tokenizer."""

ANSWER_TOKENS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptFile:
    """Conversations; answers have `output_len` tokens, or about as many as in the file."""

    path: Path
    num_prompts: int
    output_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """Requests in the Mooncake format."""

    path: Path
    num_prompts: int


class BadWorkload(TidemillError):
    """A file has no requests that can be sent."""


def sharegpt(source: ShareGptFile, rng: Random) -> Workload:
    """Return the first question of conversations that are drawn at random. Raises BadWorkload."""
    try:
        content: object = json.loads(source.path.read_text())
    except (OSError, ValueError) as error:
        raise BadWorkload(f"{source.path} is no list of conversations in JSON: {error}") from error
    entries = cast("list[object]", content) if isinstance(content, list) else []
    pairs = [pair for pair in map(_first_pair, entries) if pair is not None]
    if not pairs:
        raise BadWorkload(
            f"{source.path} has no conversations: give a list of objects with `conversations`, "
            "lists of objects with `value`, a question and then its answer"
        )
    rng.shuffle(pairs)
    return Workload(
        "sharegpt",
        tuple(
            Item(
                text=question,
                max_tokens=source.output_len or max(ANSWER_TOKENS_MIN, len(answer) // TOKEN_CHARACTERS),
                group=number,
                position=0,
                shared_tokens=0,
            )
            for number, (question, answer) in enumerate(pairs[: source.num_prompts])
        ),
    )


def _first_pair(entry: object) -> tuple[str, str] | None:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    turns = fields.get("conversations")
    match cast("list[Any]", turns)[:2] if isinstance(turns, list) else []:
        case [{"value": str(question)}, {"value": str(answer)}] if question:
            return question, answer
        case _:
            return None


def trace(source: TraceFile, vocab_size: int, seed: int) -> Workload:
    """Return the first requests of a trace, at its times. Blocks of one name have the same tokens. Raises
    TraceError."""
    seen: set[int] = set()
    sent: Counter[int] = Counter()
    items: list[Item] = []
    for number, request in enumerate(read_trace(source.path)[: source.num_prompts]):
        full = request.blocks[: request.full_blocks]
        shared = next((index for index, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
        group = request.blocks[0] if request.blocks else -1 - number
        items.append(
            Item(
                tokens=_tokens_of(request, number, vocab_size, seed),
                max_tokens=request.answer_tokens,
                group=group,
                position=sent[group],
                shared_tokens=shared * BLOCK_TOKENS,
                at_s=request.at_s,
            )
        )
        sent[group] += 1
    return Workload("trace", tuple(items), is_timed=True)


def _tokens_of(request: TraceRequest, number: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return the prompt, block by block. A part of one that the trace does not name is the request's own."""
    names: Sequence[object] = [*request.blocks, f"of request {number}"]
    tokens: list[int] = []
    for name in names[: -(-request.prompt_tokens // BLOCK_TOKENS)]:
        rng = Random(f"{seed}/{name}")  # noqa: S311  a seeded workload
        tokens += drawn_tokens(rng, vocab_size, BLOCK_TOKENS)
    return tuple(tokens[: request.prompt_tokens])
