"""The messages between the ranks of a group, as integers: frames, and in them steps and objects to move.

    frame     count | verb | number | count integers        all int64, in the machine's byte order
    STEP      rows | per row: its ROW_INTS | all tokens, pages, writes, window pages, saves
    PUT, GET  per object: kind, 16 bytes of key, id in the memory

Both ends have one byte order and one release. An answer has the number of its call.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidemill.kvstore.keys import DIGEST_BYTES, Kind, PageKey
from tidemill.kvstore.layout import CheckpointId, PageId, StateId, WindowId
from tidemill.kvstore.memory.lease import StateSave, StateWrite
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Row, Scores, Step
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.transfer.transfer import Moved

Ints: TypeAlias = NDArray[np.int64]

HEAD = struct.Struct("=qqq")
INT_BYTES = 8
ROW_INTS = 13
OBJECT_INTS = 2 + DIGEST_BYTES // INT_BYTES
NONE = -1
NO_SCORES = (0, 0)

ELSEWHERE = SamplingState(Request(request_id="", tokens=(), max_new_tokens=1))
"""The sampling state of a decoded row: only the leader draws."""

ON_HOST = SamplingState(Request(request_id="", tokens=(), max_new_tokens=1, sampling=Sampling(logprobs=0)))
"""The same of a row whose draw needs the leader's host."""

STATES = (None, ON_HOST, ELSEWHERE)

KINDS = tuple(Kind)


class Verb(IntEnum):
    """The kind of a frame. A rank sends HELLO (see link.py), then READY; the leader starts everything
    else."""

    HELLO = 1
    READY = 2
    FAILED = 3  # the text of the error: the last frame of a rank
    STEP = 4
    MAP = 5  # offset and size in bytes; the answer is 1, or 0 when the memory is not granted
    UNMAP = 6
    PUT = 7  # the answer is how many of the first objects succeeded
    GET = 8
    ANSWER = 9
    MAP_AHEAD = 10  # offset and size in bytes; no answer


class Frame(NamedTuple):
    verb: Verb
    number: int
    body: Ints


def to_bytes(verb: Verb, number: int, body: Ints) -> bytes:
    return HEAD.pack(len(body), verb, number) + body.tobytes()


def frame_of(head: bytes, body: bytes) -> Frame:
    _, verb, number = HEAD.unpack(head)
    return Frame(Verb(verb), number, np.frombuffer(body, np.int64))


def ints(values: Iterable[int] = ()) -> Ints:
    return np.fromiter(values, np.int64)


def encode(step: Step) -> Ints:
    """Encode what a rank needs of `step`: numbers in place of the names of sequences, no sampling, and of the
    tokens to score only their number."""
    heads = (
        (
            row.start,
            len(row.tokens),
            len(row.pages),
            NONE if row.read is None else row.read,
            len(row.writes),
            row.drafts,
            0 if row.sampling_state is None else 1 + row.sampling_state.bare,
            len(row.windows),
            NONE if row.restores is None else row.restores,
            len(row.saves),
            *((row.scores.offset, len(row.scores.targets)) if row.scores is not None else NO_SCORES),
            hash(row.sequence_id),
        )
        for row in step
    )
    bodies = (chain(row.tokens, row.pages, *row.writes, row.windows, *row.saves) for row in step)
    return ints(chain((len(step),), chain.from_iterable(heads), chain.from_iterable(bodies)))


def decode(body: Ints) -> Step:
    """Return the step of `encode`, with numbers as the names of its sequences, and ELSEWHERE or ON_HOST as
    sampling states."""
    left: Iterator[int] = iter(body.tolist())
    heads = [tuple(islice(left, ROW_INTS)) for _ in range(next(left))]
    step = tuple(_row(head, left) for head in heads)
    assert next(left, None) is None, "a frame is longer than its step"
    return step


def _row(head: Sequence[int], left: Iterator[int]) -> Row:
    (
        start,
        num_tokens,
        num_pages,
        read,
        num_writes,
        drafts,
        sampling_state,
        num_windows,
        restores,
        num_saves,
        offset,
        num_targets,
        name,
    ) = head
    return Row(
        sequence_id=str(name),
        tokens=tuple(islice(left, num_tokens)),
        start=start,
        pages=tuple(map(PageId, islice(left, num_pages))),
        read=None if read == NONE else StateId(read),
        writes=tuple(StateWrite(next(left), StateId(next(left))) for _ in range(num_writes)),
        windows=tuple(map(WindowId, islice(left, num_windows))),
        restores=None if restores == NONE else CheckpointId(restores),
        saves=tuple(StateSave(StateId(next(left)), CheckpointId(next(left))) for _ in range(num_saves)),
        drafts=drafts,
        sampling_state=STATES[sampling_state],
        scores=Scores(offset, (NONE,) * num_targets, 0) if num_targets else None,
    )


def encode_objects(objects: Sequence[Moved]) -> Ints:
    rows = np.empty((len(objects), OBJECT_INTS), np.int64)
    rows[:, 0] = [KINDS.index(moved.kind) for moved in objects]
    keys = np.frombuffer(b"".join(moved.key for moved in objects), np.int64)
    rows[:, 1:-1] = keys.reshape(-1, OBJECT_INTS - 2)
    rows[:, -1] = [moved.memory_id for moved in objects]
    return rows.reshape(-1)


def decode_objects(body: Ints) -> list[Moved]:
    return [
        Moved(KINDS[int(row[0])], PageKey(row[1:-1].tobytes()), int(row[-1]))
        for row in body.reshape(-1, OBJECT_INTS)
    ]


def encode_text(text: str) -> Ints:
    """Encode a text as UTF-8, padded with zeros."""
    data = text.encode()
    return np.frombuffer(data.ljust(-(-len(data) // INT_BYTES) * INT_BYTES, b"\0"), np.int64)


def decode_text(body: Ints) -> str:
    return body.tobytes().rstrip(b"\0").decode()
