"""A seal matches one body under one key; with a secret, only its owners can make one."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import LAYOUT_VERSION
from tidemill.kvstore.stores.page_store import DAMAGED, Got
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, SECRET_BYTES, Sealing

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
secrets = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)
sealings = st.builds(Sealing, st.none() | secrets)
keys = st.builds(
    ObjectKey,
    kind=st.sampled_from(Kind),
    key=st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES).map(PageKey),
    shard=st.integers(0, 0xFFFF),
)
bodies = st.binary(max_size=300)


@PROPERTY
@given(sealings, keys, bodies)
def test_seal_verifies_its_own_object(sealing: Sealing, key: ObjectKey, body: bytes) -> None:
    found = sealing.seal(key, memoryview(body))
    assert len(found) == SEAL_BYTES
    assert sealing.verify(key, memoryview(body), found) is Got.HIT
    assert sealing.verify(key, memoryview(bytearray(body)), bytearray(found)) is Got.HIT
    assert sealing.verify(key, memoryview(body), memoryview(found)) is Got.HIT


@PROPERTY
@given(sealings, keys, bodies, st.data())
def test_seal_detects_any_flipped_bit(
    sealing: Sealing, key: ObjectKey, body: bytes, data: st.DataObject
) -> None:
    stored = bytearray(sealing.seal(key, memoryview(body)) + body)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    assert sealing.verify(key, memoryview(stored)[SEAL_BYTES:], stored[:SEAL_BYTES]) in DAMAGED


@PROPERTY
@given(sealings, keys, bodies, st.integers(1, 400), bodies)
def test_seal_detects_another_body(
    sealing: Sealing, key: ObjectKey, body: bytes, lost: int, other: bytes
) -> None:
    found = sealing.seal(key, memoryview(body))
    stored = (found + body)[:-lost]
    assert sealing.verify(key, memoryview(stored)[SEAL_BYTES:], stored[:SEAL_BYTES]) is Got.CORRUPT
    for wrong in {other, body + other} - {body}:
        assert sealing.verify(key, memoryview(wrong), found) is Got.CORRUPT


@PROPERTY
@given(sealings, keys, keys, bodies)
def test_seal_depends_on_each_part_of_the_key(
    sealing: Sealing, key: ObjectKey, other: ObjectKey, body: bytes
) -> None:
    found = sealing.seal(key, memoryview(body))
    others = {replace(key, kind=kind) for kind in Kind}
    others |= {other, replace(key, shard=key.shard ^ 1)}
    others.add(replace(key, key=PageKey(bytes([key.key[0] ^ 1]) + key.key[1:])))
    verified = {sealing.verify(wrong, memoryview(body), found) for wrong in others - {key}}
    assert verified == {Got.CORRUPT}


@PROPERTY
@given(secrets, sealings, keys, bodies)
def test_seal_cannot_be_forged_without_the_secret(
    secret: bytes, theirs: Sealing, key: ObjectKey, body: bytes
) -> None:
    assume(theirs.secret != secret)
    ours = Sealing(secret)
    assert ours.verify(key, memoryview(body), theirs.seal(key, memoryview(body))) is Got.CORRUPT
    assert ours.describe() != theirs.describe()


@PROPERTY
@given(secrets, keys, st.binary(min_size=1, max_size=300), st.data())
def test_seal_with_a_secret_cannot_be_adapted(
    secret: bytes, key: ObjectKey, body: bytes, data: st.DataObject
) -> None:
    """An attacker may combine the seals of other bodies, and seals without a secret."""
    ours = Sealing(secret)
    other = bytearray(body)
    other[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    adapted = PLAIN.seal(key, memoryview(other))
    for start in (ours.seal(key, memoryview(body)), adapted):
        for digest in (ours.seal(key, memoryview(body))[-16:], adapted[-16:]):
            assert ours.verify(key, memoryview(other), start[:-16] + digest) is Got.CORRUPT


def test_sealing_does_not_show_its_secret() -> None:
    sealing = Sealing(b"s3cret__" * (SECRET_BYTES // 8))
    assert "s3cret" not in repr(sealing)
    assert "s3cret" not in sealing.describe()
    assert PLAIN.describe() == ""


@pytest.mark.parametrize("secret", [None, bytes(SECRET_BYTES)])
def test_seal_distinguishes_another_version_from_corruption(secret: bytes | None) -> None:
    sealing = Sealing(secret)
    key, body = ObjectKey(Kind.PAGE, PageKey(bytes(16))), memoryview(b"tidemill")
    found = sealing.seal(key, body)
    older = b"TMO2" + found[4:]
    newer = found[:4] + (LAYOUT_VERSION + 1).to_bytes(4, "little") + found[8:]
    assert sealing.verify(key, body, older) is Got.OTHER_VERSION
    assert sealing.verify(key, body, newer) is Got.OTHER_VERSION
    assert sealing.verify(key, body, b"") is Got.CORRUPT
    assert sealing.verify(key, body, b"TMO") is Got.CORRUPT
    assert sealing.verify(key, body, bytes(SEAL_BYTES)) is Got.CORRUPT


@pytest.mark.parametrize(
    ("secret", "digest"),
    [
        (None, "e1c513ffc68cda91e18c2023dbaf5c17"),
        (bytes(range(SECRET_BYTES)), "b3a461633e5bca016ba6b80c9c845e07"),
    ],
    ids=["plain", "keyed"],
)
def test_seal_format_is_pinned(secret: bytes | None, digest: str) -> None:
    """A change makes every stored object unreadable: raise LAYOUT_VERSION or the magic with it."""
    key = ObjectKey(Kind.PAGE, PageKey(bytes(range(16))), 0x0103)
    assert Sealing(secret).seal(key, memoryview(b"tidemill")).hex() == (
        "544d4f33"
        "01000000"
        "0800000000000000"
        "70"
        f"{'78' if secret is None else '62'}"
        "000000000000000000000000"
        "0301"
        "000102030405060708090a0b0c0d0e0f" + digest
    )
