"""Sizes in bytes as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.sizes import parse_bytes

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("8Gi", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5 KiB", 1536),
        (" 2t ", 2 << 40),
        ("4096", 4096),
        ("4096B", 4096),
        ("0", 0),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_bytes_accepts_each_form(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "8GiBB", "1,5g", "0x10", "8GiB 1", "nan"])
def test_parse_bytes_names_the_forms_for_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 512MiB"):
        parse_bytes(text)


@PROPERTY
@given(st.integers(0, 1 << 60))
def test_parse_bytes_keeps_plain_numbers_exact(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes
