"""Each term of docs/glossary.md stands in the file that the glossary names."""

import re
from pathlib import Path

import pytest

from tests.tidy.test_tidy import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/glossary.md").read_text().splitlines()
    if line.startswith("|") and line.count("|") == 5 and not line.startswith(("|---", "| Term |"))
]


def spoken(text: str) -> str:
    """Return the words of code and prose alike: `StepInFlight` and `step_in_flight` are "step in flight"."""
    return re.sub(r"[_\s]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_term_stands_in_the_named_file(row: list[str]) -> None:
    terms, _, meaning, where = row
    text = spoken(Path(ROOT, where.strip("`")).read_text())
    assert any(spoken(term.strip()) in text for term in terms.split(",")), f"{where} has no {terms!r}"
    assert meaning


def test_terms_are_listed_once() -> None:
    terms = [row[0] for row in ROWS]
    assert len(terms) == len(set(terms)) > 40
