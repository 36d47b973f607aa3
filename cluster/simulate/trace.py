"""Request traces in the Mooncake format: one JSON object for each request, in the order of arrival.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds. `hash_ids` name the blocks of 512 tokens of the prompt, the last one perhaps
not full; a name covers everything before it too, so equal names are equal prefixes.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

from tidemill.kvstore.errors import TidemillError

BLOCK_TOKENS = 512


class TraceError(TidemillError):
    """A file that is no trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it comes, and the names of the blocks of its prompt."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]

    @property
    def full_blocks(self) -> int:
        """Those below the last token of the prompt, which is always computed."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """Sorted by arrival, the first one at 0. Raises TraceError, which names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    items = [_item(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise TraceError(f"{path} holds no requests")
    items.sort(key=lambda item: item.at_s)
    start_s = items[0].at_s
    return chained([replace(item, at_s=item.at_s - start_s) for item in items])


def chained(items: Iterable[TraceRequest]) -> list[TraceRequest]:
    """With names that cover everything before them, also of a trace whose names cover their block alone."""
    names: dict[tuple[int, int], int] = {}
    renamed: list[TraceRequest] = []
    for item in items:
        blocks: list[int] = []
        for block in item.blocks:
            blocks.append(names.setdefault((blocks[-1] if blocks else -1, block), len(names)))
        renamed.append(replace(item, blocks=tuple(blocks)))
    return renamed


def spread(items: Sequence[TraceRequest], rng: Random) -> list[TraceRequest]:
    """Requests that came in the same tick of a coarse clock come anywhere before the next tick."""
    ticks = sorted({item.at_s for item in items})
    until = dict(pairwise(ticks))
    moved = [
        replace(item, at_s=item.at_s + rng.random() * (until.get(item.at_s, item.at_s) - item.at_s))
        for item in items
    ]
    return sorted(moved, key=lambda item: item.at_s)


def sped_up(items: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    return [replace(item, at_s=item.at_s / factor) for item in items]


def reusable_tokens(items: Iterable[TraceRequest]) -> float:
    """The share of all prompt tokens that one cache without a bound would spare."""
    seen: set[int] = set()
    found = total = 0
    for item in items:
        full = item.blocks[: item.full_blocks]
        hits = next((index for index, block in enumerate(full) if block not in seen), len(full))
        found += hits * BLOCK_TOKENS
        total += item.prompt_tokens
        seen.update(full)
    return found / total


def _item(line: str, where: str) -> TraceRequest:
    try:
        found: object = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON: a trace has one object on each line") from error
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    at_ms, names = fields.get("timestamp"), fields.get("hash_ids")
    prompt, answer = fields.get("input_length"), fields.get("output_length")
    if not (
        isinstance(at_ms, int | float)
        and isinstance(prompt, int)
        and isinstance(answer, int)
        and isinstance(names, list)
    ):
        raise TraceError(f"{where} lacks one of timestamp, input_length, output_length, hash_ids")
    names = cast("list[Any]", names)
    if (
        prompt < 1
        or len(names) < (prompt - 1) // BLOCK_TOKENS
        or not all(isinstance(name, int) for name in names)
    ):
        raise TraceError(f"{where}: {prompt} tokens are not {len(names)} blocks of {BLOCK_TOKENS}")
    return TraceRequest(at_ms / 1000, prompt, max(1, answer), tuple(names))
