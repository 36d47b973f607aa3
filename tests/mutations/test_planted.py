"""The planted bugs still fit the code; whether the tests notice them is `make mutations`."""

from pathlib import Path

import pytest

from tests.mutations.catalog import PLANTED
from tests.mutations.planted import Planted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.bug)
def test_a_planted_bug_changes_one_place(planted: Planted) -> None:
    assert (ROOT / planted.file).read_text().count(planted.old) == 1
    assert planted.new != planted.old
    assert all((ROOT / test.partition("::")[0]).is_file() for test in planted.tests.split())


def test_bugs_have_names_of_their_own() -> None:
    assert len({planted.bug for planted in PLANTED}) == len(PLANTED)
