"""Each term of docs/glossary.md stands in the file that the glossary names."""

import re

from tests.tidy.tree import ROOT, none

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/glossary.md").read_text().splitlines()
    if line.startswith("|") and line.count("|") == 5 and not line.startswith(("|---", "| Term |"))
]


def spoken(text: str) -> str:
    """Return the words of code and prose alike: `StepInFlight` and `step_in_flight` are "step in flight"."""
    return re.sub(r"[_\s]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def test_terms_stand_in_the_named_files() -> None:
    for terms, _, meaning, _ in ROWS:
        assert meaning, f"{terms} of docs/glossary.md has no meaning"
    none(
        (
            f"{where} has no {terms!r}"
            for terms, _, _, where in ROWS
            if not any(
                spoken(term.strip()) in spoken((ROOT / where.strip("`")).read_text())
                for term in terms.split(",")
            )
        ),
        "name the file that has the term in docs/glossary.md",
    )


def test_terms_are_listed_once() -> None:
    terms = [row[0] for row in ROWS]
    assert len(terms) == len(set(terms)) > 40
