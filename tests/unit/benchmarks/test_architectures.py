"""The table of bytes by architecture agrees with an arena, and with known figures."""

import pytest
from benchmarks.engine.released import PAGE_TOKENS, RELEASED, bytes_by_architecture, released_layout
from benchmarks.rows import read_rows

from tests.support.parity.steps import check_memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RELEASED)
def test_bytes_of_the_table_are_those_of_the_arena(name: str) -> None:
    check_memory(released_layout(name))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("Llama-3.1-8B", 32 * 2 * 8 * 128 * 2),
        ("Qwen3-Next-80B-A3B", 12 * 2 * 2 * 256 * 2),
        ("gpt-oss-20b", 12 * 2 * 8 * 64 * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),
    ],
)
def test_bytes_of_a_token_follow_from_its_config(name: str, token_bytes: int) -> None:
    assert released_layout(name).page_bytes == PAGE_TOKENS * token_bytes


def test_table_that_is_published_is_the_one_that_the_specs_make() -> None:
    assert read_rows("architectures") == bytes_by_architecture()
