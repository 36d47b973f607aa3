"""Messages between the ranks of a group survive encoding as integers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.keys import DIGEST_BYTES, Kind, PageKey
from tidemill.kvstore.layout import CheckpointId, PageId, StateId, WindowId
from tidemill.kvstore.memory.lease import StateSave, StateWrite
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Row, Scores, Step
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.parallel.frames import (
    ELSEWHERE,
    HEAD,
    NONE,
    ON_HOST,
    Verb,
    decode,
    decode_objects,
    decode_text,
    encode,
    encode_objects,
    encode_text,
    frame_of,
    ints,
    to_bytes,
)
from tidemill.workers.transfer.transfer import Moved

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
REQUEST = Request(request_id="a", tokens=(1,), max_new_tokens=1)
BIASED = replace(REQUEST, sampling=Sampling(logit_bias=((1, 1.0),)))

ids = st.integers(0, 1 << 40)
rows = st.builds(
    Row,
    sequence_id=st.text(max_size=3),
    tokens=st.lists(st.just(PENDING) | ids, min_size=1, max_size=6).map(tuple),
    start=ids,
    pages=st.lists(ids.map(PageId), max_size=6).map(tuple),
    read=st.none() | ids.map(StateId),
    writes=st.lists(st.builds(StateWrite, ids, ids.map(StateId)), max_size=4).map(tuple),
    drafts=st.integers(0, 3),
    sampling_state=st.none() | st.builds(SamplingState, st.sampled_from((REQUEST, BIASED))),
    windows=st.lists(ids.map(WindowId), max_size=6).map(tuple),
    restores=st.none() | ids.map(CheckpointId),
    saves=st.lists(st.builds(StateSave, ids.map(StateId), ids.map(CheckpointId)), max_size=4).map(tuple),
    arrivals=st.just(()),  # ranks wait for whole pages
    scores=st.none() | st.builds(Scores, ids, st.lists(ids, min_size=1, max_size=4).map(tuple), ids),
)
objects = st.builds(
    Moved, st.sampled_from(Kind), st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES).map(PageKey), ids
)


@PROPERTY
@given(st.lists(rows, max_size=5).map(tuple))
def test_step(step: Step) -> None:
    """All of it but what the leader alone knows."""
    assert decode(encode(step)) == tuple(
        row._replace(
            sequence_id=str(hash(row.sequence_id)),
            sampling_state=row.sampling_state and (ELSEWHERE if row.sampling_state.bare else ON_HOST),
            scores=row.scores and Scores(row.scores.offset, (NONE,) * len(row.scores.targets), 0),
        )
        for row in step
    )


@PROPERTY
@given(st.lists(objects, max_size=5))
def test_objects(moved: list[Moved]) -> None:
    assert decode_objects(encode_objects(moved)) == moved


@PROPERTY
@given(st.text().map(lambda text: text.rstrip("\0")))
def test_text(text: str) -> None:
    assert decode_text(encode_text(text)) == text


@PROPERTY
@given(st.sampled_from(Verb), ids, st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5))
def test_frames(verb: Verb, number: int, values: list[int]) -> None:
    data = to_bytes(verb, number, ints(values))
    frame = frame_of(data[: HEAD.size], data[HEAD.size :])
    assert (frame.verb, frame.number, frame.body.tolist()) == (verb, number, values)
