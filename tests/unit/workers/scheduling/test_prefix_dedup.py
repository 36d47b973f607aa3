"""The waits for a shared prefix in progress, with sequences that do not run."""

import asyncio

import pytest

from tests.support.kvstore.leases import P, a_ledger, grow
from tests.support.workers.bench import IN_VIRTUAL_TIME
from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import Request
from tidemill.workers.scheduling.prefix_dedup import InProgressPrefixes
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.scheduling.sequences import Sequences

pytestmark = IN_VIRTUAL_TIME

ROOT = Namespace(model="m", layout="l").root()
SHARED = (1, 2, 3, 4, 5, 6)


def a_sequence(arrival: int, tokens: tuple[int, ...]) -> Sequence:
    request = Request(request_id=str(arrival), tokens=tokens, max_new_tokens=1)
    return Sequence(
        id=str(arrival),
        seniority=(0.0, arrival),
        request=request,
        root=ROOT,
        page_tokens=P,
        produces=False,
        tokens=list(tokens),
        target=len(tokens),
        sampling_state=SamplingState(request),
        drafter=None,
        keys=page_keys(ROOT, tokens, P),
    )


class Scene:
    """Makers over an empty index; sequences get a lease when they are to be seen as running."""

    def __init__(self) -> None:
        self.ledger: Ledger = a_ledger(40)
        self.in_progress = InProgressPrefixes(self.ledger.index, Sequences().precedence)

    def running(self, arrival: int, tokens: tuple[int, ...]) -> Sequence:
        sequence = a_sequence(arrival, tokens)
        sequence.lease = self.ledger.open(sequence.id)
        return sequence

    def compute(self, sequence: Sequence, num_tokens: int, *, keep: bool = True) -> None:
        """Up to there, and leave a checkpoint if `keep`."""
        assert sequence.lease is not None
        before = sequence.computed
        lease = grow(self.ledger, sequence.lease, num_tokens, sequence.keys)
        if keep:
            self.ledger.keep_state(lease)
        self.in_progress.advanced(sequence, before)

    async def follows(self, sequence: Sequence) -> "asyncio.Task[None] | None":
        """Return the wait of `sequence`, or None when it does not wait."""
        task = asyncio.create_task(self.in_progress.wait(sequence))
        await asyncio.sleep(1e-6)  # virtual: until everything ready has run
        return None if task.done() else task


@pytest.mark.parametrize("depth", [2, 4, 6])
async def test_follower_waits_until_the_last_page_that_both_have_is_there(depth: int) -> None:
    scene = Scene()
    maker = scene.running(0, (*SHARED, 7, 8, 9))
    assert await scene.follows(maker) is None
    waiting = await scene.follows(a_sequence(1, (*SHARED[:depth], 90, 91, 92)))
    assert waiting is not None
    assert maker.restore.junctions == {depth}, "the maker leaves a checkpoint where they part"
    for computed in range(2, depth, 2):
        scene.compute(maker, computed)
        await asyncio.sleep(1)
        assert not waiting.done()
    scene.compute(maker, depth)
    await waiting


@pytest.mark.parametrize("computed", [0, 2])
async def test_when_the_maker_leaves_one_follower_takes_its_place(computed: int) -> None:
    scene = Scene()
    maker = scene.running(0, (*SHARED, 7))
    assert await scene.follows(maker) is None
    followers = [scene.running(arrival, (*SHARED, 10 + arrival)) for arrival in range(1, 6)]
    waits = [await scene.follows(follower) for follower in followers]
    assert None not in waits
    if computed:
        scene.compute(maker, computed)
    scene.in_progress.left(maker)
    await asyncio.sleep(1)
    successors = [
        follower for follower, wait in zip(followers, waits, strict=True) if wait is not None and wait.done()
    ]
    assert len(successors) == 1
    scene.compute(successors[0], 6)
    await asyncio.sleep(1)
    assert all(wait is not None and wait.done() for wait in waits)


async def test_request_does_not_wait_for_a_younger_one_behind_it() -> None:
    scene = Scene()
    younger = a_sequence(5, (*SHARED, 7))
    assert await scene.follows(younger) is None
    assert await scene.follows(a_sequence(3, (*SHARED, 8))) is None
    assert await scene.follows(a_sequence(6, (*SHARED, 8))) is not None
    scene = Scene()
    assert await scene.follows(scene.running(5, (*SHARED, 7))) is None
    assert await scene.follows(a_sequence(3, (*SHARED, 8))) is not None, "it runs already"


@pytest.mark.parametrize("preemptions", [0, 1])
async def test_request_does_not_wait_for_one_that_was_preempted(preemptions: int) -> None:
    """It may wait for memory that this one gets first, and then both would wait forever."""
    scene = Scene()
    maker = a_sequence(0, (*SHARED, 7))
    maker.restore.preemptions = preemptions
    assert await scene.follows(maker) is None
    second = await scene.follows(a_sequence(1, (*SHARED, 8)))
    assert (second is None) == bool(preemptions)
    third = await scene.follows(a_sequence(2, (*SHARED, 9)))
    assert third is not None, "the second one makes the prefix instead"
    scene.in_progress.left(maker)
    await asyncio.sleep(1)
    assert not third.done() or not preemptions
