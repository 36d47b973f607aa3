"""The benchmark of accuracy: paths of keeper do not differ, and a difference is seen."""

from dataclasses import replace
from math import inf, log

import pytest
from benchmarks import accuracy
from benchmarks.accuracy import Drawn, compared, divergence, main, paths, prompts_of

from tidemill.cluster.offline.llm import settings_of
from tidemill.workers.messages import TokenLogprob

PROMPTS = 12
PAGE_TOKENS = 16


def score(*probabilities: float) -> TokenLogprob:
    top = tuple((token, log(probability)) for token, probability in enumerate(probabilities))
    return TokenLogprob(top[0][1], top)


def test_every_path_of_keeper_has_the_distributions_of_the_cold_one() -> None:
    settings = settings_of("keeper", {"memory": "64MiB", "page_size": PAGE_TOKENS, "backing": "fixed"})
    text = [(31 * at * at + 7 * at) % 500 for at in range(2000)]
    found = paths(settings, text, PROMPTS)
    for row in found.values():
        assert row["positions"] == PROMPTS * accuracy.NEW_TOKENS
        assert (row["answers_that_differ"], row["kl_mean"], row["kl_max"]) == (0, 0, 0)
    assert found["cold"]["reused_tokens"] == found["cold"]["fetched_tokens"] == 0
    assert found["warm"]["reused_tokens"] > 0
    assert found["fetched"]["fetched_tokens"] > 0
    assert found["resumed"]["fetched_tokens"] > 0


def test_prompts_of_a_family_branch_within_their_stem() -> None:
    requests = prompts_of(range(5000), PAGE_TOKENS, accuracy.FAMILY)
    first = requests[0].tokens[:PAGE_TOKENS]
    assert all(request.tokens[:PAGE_TOKENS] == first for request in requests)
    assert len({request.tokens for request in requests}) == accuracy.FAMILY


def test_divergence() -> None:
    assert divergence(score(0.5, 0.25), score(0.5, 0.25)) == 0
    assert divergence(score(0.5, 0.25), score(0.25, 0.5)) == pytest.approx(0.25 * log(2))
    assert divergence(score(0.5), score(0.25)) == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))
    assert divergence(score(0.5), TokenLogprob(-1.0, ((7, -1.0),))) == inf


def test_a_path_that_differs_is_seen_up_to_its_first_other_token() -> None:
    right = Drawn([1, 2, 3], [score(0.5), score(0.5), score(0.5)], 0, 0)
    other = replace(right, tokens=[1, 9, 3], scores=[score(0.5), score(0.25), score(0.1)])
    row = compared({"a": right}, {"a": other})
    assert (row["answers_that_differ"], row["positions"]) == (1, 2)
    assert row["kl_max"] == divergence(score(0.5), score(0.25)) > 0


def test_lm_eval_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_name: str) -> None: ...

    monkeypatch.setattr(accuracy, "find_spec", missing)
    with pytest.raises(SystemExit):
        main(["keeper", "--only", "gsm8k"])
    assert "pip install 'tidemill[accuracy]'" in capsys.readouterr().err
