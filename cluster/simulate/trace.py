"""Request traces in the Mooncake format: one JSON object for each request, in the order of arrival.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds. `hash_ids` name the blocks of 512 tokens of the prompt; the last one
may be partial. A name also covers all blocks before it, so that equal names are equal prefixes.
A request may also have the fields of Hints: `breakpoints`, `session` and `retain_s`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RETAIN_S_MAX

BLOCK_TOKENS = 512


class TraceError(TidemillError):
    """A file is not a trace."""


class Hints(NamedTuple):
    """The hints of clients and edges: depths in tokens where later prompts leave this one, the session, and
    for how many seconds the prompt is retained after its last use."""

    breakpoints: tuple[int, ...] = ()
    session: str = ""
    retain_s: float = 0.0


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request: its arrival, its lengths, and the names of the blocks of its prompt.

    A `client` with a name has one request at a time. It sends the next one `pause_s` after the last answer,
    and `at_s` is the arrival if answers take no time to begin.
    """

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]
    hints: Hints = NO_HINTS
    client: str = ""
    pause_s: float = 0.0

    @property
    def full_blocks(self) -> int:
        """The number of full blocks below the last prompt token, which is always computed."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """Read requests, sorted by arrival from 0. Raises TraceError, which names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    requests = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.at_s)
    start_s = requests[0].at_s
    return chain_blocks([replace(request, at_s=request.at_s - start_s) for request in requests])


def chain_blocks(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Rename blocks so that a name covers all blocks before it, for traces where it does not."""
    names: dict[tuple[int, int], int] = {}
    renamed: list[TraceRequest] = []
    for request in requests:
        blocks: list[int] = []
        for block in request.blocks:
            blocks.append(names.setdefault((blocks[-1] if blocks else -1, block), len(names)))
        renamed.append(replace(request, blocks=tuple(blocks)))
    return renamed


def spread(requests: Sequence[TraceRequest], rng: Random) -> list[TraceRequest]:
    """Spread requests of the same tick of a coarse clock at random until the next tick."""
    ticks = sorted({request.at_s for request in requests})
    until = dict(pairwise(ticks))
    moved = [
        replace(
            request, at_s=request.at_s + rng.random() * (until.get(request.at_s, request.at_s) - request.at_s)
        )
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.at_s)


def copied(requests: Sequence[TraceRequest], copies: int) -> list[TraceRequest]:
    """Return the requests of several copies, which share no prefix, by arrival."""
    return [
        replace(request, blocks=tuple(block + (copy << 40) for block in request.blocks))
        for request in requests
        for copy in range(copies)
    ]


def speed_up(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    return [
        replace(request, at_s=request.at_s / factor, pause_s=request.pause_s / factor) for request in requests
    ]


def by_client(requests: Iterable[TraceRequest]) -> list[list[tuple[int, TraceRequest]]]:
    """Return the requests of each client with their numbers, sorted by the first arrival; one without a
    client is alone."""
    chains: dict[str | int, list[tuple[int, TraceRequest]]] = {}
    for number, request in enumerate(requests):
        chains.setdefault(request.client or number, []).append((number, request))
    return list(chains.values())


def reusable_share(requests: Iterable[TraceRequest]) -> float:
    """Return the share of all prompt tokens that a single unbounded cache would save."""
    seen: set[int] = set()
    reused = total = 0
    for request in requests:
        full = request.blocks[: request.full_blocks]
        hits = next((index for index, block in enumerate(full) if block not in seen), len(full))
        reused += hits * BLOCK_TOKENS
        total += request.prompt_tokens
        seen.update(full)
    return reused / total


def _parse(line: str, where: str) -> TraceRequest:
    try:
        content: object = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON: a trace has one object per line") from error
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
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
    return TraceRequest(at_ms / 1000, prompt, max(1, answer), tuple(names), _hints(fields, where))


def _hints(fields: dict[str, Any], where: str) -> Hints:
    depths, session, retain_s = (fields.get(name, empty) for name, empty in NO_HINTS._asdict().items())
    if not (
        isinstance(depths, (list, tuple))
        and all(isinstance(depth, int) and depth > 0 for depth in cast("list[object]", depths))
        and isinstance(session, str)
        and isinstance(retain_s, int | float)
        and 0 <= retain_s <= RETAIN_S_MAX
    ):
        raise TraceError(
            f"{where}: give breakpoints as a list of tokens, session as a string, and retain_s from 0 to "
            f"{RETAIN_S_MAX:.0f}"
        )
    return Hints(tuple(sorted(cast("list[int]", depths))), session, float(retain_s))
