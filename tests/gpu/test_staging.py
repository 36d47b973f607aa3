"""The staging ring with real device memory: right bytes, and no wait for other streams."""

import pytest
import torch

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.transfer.arena_io import StagedObject
from tidemill.workers.transfer.staging import StagingRing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OBJECT_BYTES = 3 << 19  # a page of Qwen3-Next-80B
OBJECTS = 64
OTHER_CYCLES = 20_000_000_000  # about 10 s: longer than the transfers by far, so still there after them


def objects(first: int = 0) -> list[StagedObject]:
    return [
        StagedObject(
            ObjectKey(Kind.PAGE, PageKey(index.to_bytes(16, "little"))),
            (first + index) * OBJECT_BYTES,
            OBJECT_BYTES,
        )
        for index in range(OBJECTS)
    ]


async def test_there_and_back_beside_a_step() -> None:
    """The step occupies its stream before, while and after the objects move."""
    draw = torch.Generator("cuda").manual_seed(0)
    shape, cuda = (2 * OBJECTS * OBJECT_BYTES,), torch.device("cuda")
    source = torch.randint(256, shape, dtype=torch.uint8, device=cuda, generator=draw)
    target = torch.zeros(shape, dtype=torch.uint8, device=cuda)
    store = MemoryStore(1 << 30)
    rings = [StagingRing(store, memory, 8 * OBJECT_BYTES, OBJECT_BYTES) for memory in (source, target)]
    torch.cuda.synchronize()
    step_stream = torch.cuda.Stream()
    with torch.cuda.stream(step_stream):
        torch.cuda._sleep(OTHER_CYCLES)
        step = step_stream.record_event()
    assert await rings[0].put(objects()) == [Put.STORED] * OBJECTS
    assert await rings[1].get(objects(first=OBJECTS)) == [Got.HIT] * OBJECTS
    assert not step.query(), "a transfer waited for the whole device"
    half = OBJECTS * OBJECT_BYTES
    assert torch.equal(target[half:].cpu(), source[:half].cpu())
    assert not bool(target[:half].cpu().any())
    for ring in rings:
        await ring.close()
    torch.cuda.synchronize()
