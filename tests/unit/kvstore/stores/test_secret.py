"""The file of the store secret: its forms, and mistakes."""

from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.seal import SECRET_BYTES
from tidemill.kvstore.stores.secret import is_public, read_secret


@given(
    secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
    ending=st.sampled_from(["", "\n", " \r\n"]),
)
def test_read_secret_accepts_each_form(
    tmp_path_factory: pytest.TempPathFactory, secret: bytes, ending: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "secret"
    texts = [secret.hex(), secret.hex().upper(), b64encode(secret).decode()]
    for content in [secret, *((text + ending).encode() for text in texts)]:
        file.write_bytes(content)
        assert read_secret(file) == secret


@pytest.mark.parametrize(
    "content",
    [b"", b"secret", bytes(31), bytes(33), b"0" * 63, b"g" * 64, b64encode(bytes(31)), "ü".encode() * 32],
)
def test_read_secret_refuses_other_contents(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(StoreError, match="openssl rand -hex 32") as refused:
        read_secret(file)
    assert "\n" not in str(refused.value)


def test_read_secret_refuses_an_unreadable_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreError, match="cannot be read"):
            read_secret(path)


def test_is_public_finds_files_that_all_users_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(bytes(SECRET_BYTES))
    for mode, public in ((0o600, False), (0o640, False), (0o644, True)):
        file.chmod(mode)
        assert is_public(file) is public
