"""A seal fits one body under one key, and nothing else."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.seal import SEAL_BYTES, seal, verify

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
keys = st.builds(
    ObjectKey,
    kind=st.sampled_from(Kind),
    key=st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES).map(PageKey),
    shard=st.integers(0, 0xFFFF),
)
bodies = st.binary(max_size=300)


@PROPERTY
@given(keys, bodies)
def test_its_own_object_fits(key: ObjectKey, body: bytes) -> None:
    found = seal(key, memoryview(body))
    assert len(found) == SEAL_BYTES
    assert verify(key, memoryview(body), found)
    assert verify(key, memoryview(bytearray(body)), bytearray(found))


@PROPERTY
@given(keys, bodies, st.data())
def test_any_flipped_bit_is_found(key: ObjectKey, body: bytes, data: st.DataObject) -> None:
    stored = bytearray(seal(key, memoryview(body)) + body)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    assert not verify(key, memoryview(stored)[SEAL_BYTES:], stored[:SEAL_BYTES])


@PROPERTY
@given(keys, bodies, st.integers(1, 400))
def test_truncation_is_found(key: ObjectKey, body: bytes, lost: int) -> None:
    stored = (seal(key, memoryview(body)) + body)[:-lost]
    assert not verify(key, memoryview(stored)[SEAL_BYTES:], stored[:SEAL_BYTES])


@PROPERTY
@given(keys, bodies, st.binary(min_size=1, max_size=64))
def test_bytes_behind_the_body_are_found(key: ObjectKey, body: bytes, more: bytes) -> None:
    assert not verify(key, memoryview(body + more), seal(key, memoryview(body)))


@PROPERTY
@given(keys, keys, bodies, bodies)
def test_an_object_under_another_name_is_found(
    key: ObjectKey, other: ObjectKey, body: bytes, else_: bytes
) -> None:
    assume(key != other)
    assert not verify(other, memoryview(body), seal(key, memoryview(body)))
    assume(body != else_)
    assert not verify(key, memoryview(else_), seal(key, memoryview(body)))


@PROPERTY
@given(keys, bodies)
def test_each_part_of_the_key_counts(key: ObjectKey, body: bytes) -> None:
    found = seal(key, memoryview(body))
    kind = Kind.PAGE if key.kind is Kind.CHECKPOINT else Kind.CHECKPOINT
    digest = PageKey(bytes([key.key[0] ^ 1]) + key.key[1:])
    others = (replace(key, kind=kind), replace(key, key=digest), replace(key, shard=key.shard ^ 1))
    assert not any(verify(other, memoryview(body), found) for other in others)


def test_the_format_is_pinned() -> None:
    """A change here makes every stored object unreadable: raise LAYOUT_VERSION or the magic with it."""
    key = ObjectKey(Kind.PAGE, PageKey(bytes(range(16))), 0x0103)
    assert seal(key, memoryview(b"tidemill")).hex() == (
        "544d4f32"
        "01000000"
        "0800000000000000"
        "70"
        "00000000000000000000000000"
        "0301"
        "000102030405060708090a0b0c0d0e0f"
        "e1c513ffc68cda91e18c2023dbaf5c17"
    )
