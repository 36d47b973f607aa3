"""The benchmark of accuracy: paths of keeper do not differ, and a difference is seen."""

from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf, log
from pathlib import Path
from threading import Thread

import pytest
from benchmarks import accuracy
from benchmarks.accuracy import Drawn, compared, divergence, main, paths, prompts_of

from tests.support.e2e import server
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


class Named:
    """A server that knows its model by another name than that of the folder."""

    def __init__(self, _options: list[str], _log: Path) -> None:
        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"data": [{"id": "served"}]}')

        self._http = HTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        Thread(target=self._http.serve_forever, daemon=True).start()

    def kill_everything(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def test_lm_eval_asks_for_the_model_by_its_served_name(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        output = Path(command[command.index("--output_path") + 1])
        output.mkdir()
        (output / "results_now.json").write_text('{"results": {"gsm8k": {"score": 1}}}')

    monkeypatch.setattr(accuracy, "check_gsm8k", lambda: None)
    monkeypatch.setattr(accuracy.subprocess, "run", run)
    monkeypatch.setattr(server, "Server", Named)
    assert accuracy.gsm8k(Path("folder"), [], 3) == {"score": 1}
    (command,) = commands
    assert command[command.index("--model_args") + 1].startswith("model=served,base_url=http://127.0.0.1:")
