"""The tables of pages are those that the files of results make."""

from pathlib import Path

import pytest
from benchmarks import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table: " in text
    assert tables.filled(text) == text, "run: python -m benchmarks.tables"
