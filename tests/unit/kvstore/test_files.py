"""Files that others may have written: what is no regular file, or too large, is an error and no wait."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.kvstore.files import read_regular


def test_regular_file_is_read_through_links_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "file", 4)


MAKERS: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device without end": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    MAKERS[kind](tmp_path / "file")
    with pytest.raises(OSError, match=r".") as refused:
        read_regular(tmp_path / "file", 5)
    assert refused.value.strerror
