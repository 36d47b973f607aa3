"""`tidemill why`: what it sends, and its sentences."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.fake_service import FakeService, saying, with_server
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.why import REASONS, ask_all, read_prompts, sentences
from tidemill.workers.cache_lookup import MISS_REASONS

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9, "stream": True}


def written(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    return file


def test_each_reason_has_a_sentence() -> None:
    assert {*REASONS} == {*MISS_REASONS}


def test_bodies_go_where_they_belong_and_ask_for_one_token(tmp_path: Path) -> None:
    file = written(tmp_path, "a b", CHAT, {"input": "a"})
    one = {"stream": False, "max_tokens": 1}
    assert read_prompts(file, None) == [
        ("/v1/completions", {"prompt": "a b", **one}),
        ("/v1/chat/completions", {"messages": CHAT["messages"], **one}),
        ("/v1/responses", {"input": "a", "stream": False, "max_output_tokens": 1}),
    ]
    assert {path for path, _ in read_prompts(file, "/v1/messages")} == {"/v1/messages"}


@pytest.mark.parametrize(
    ("lines", "named"),
    [((), "0 prompts"), (("a",), "1 prompts"), (("a", 3), "line 2"), (("a", {"x": 1}), "--endpoint")],
)
def test_file_that_it_cannot_send(tmp_path: Path, lines: tuple[object, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read_prompts(written(tmp_path, *lines), None)
    (tmp_path / "no.jsonl").write_text("{")
    for name in ("no.jsonl", "absent.jsonl"):
        with pytest.raises(UsageError, match="JSON Lines"):
            read_prompts(tmp_path / name, None)


def test_prompts_are_sent_under_a_salt_of_their_own_without_a_key(tmp_path: Path) -> None:
    service = FakeService(saying(" a"))
    prompts = read_prompts(written(tmp_path, "a b", {"prompt": "a b c", "cache_salt": "x"}, "a b c"), None)
    waits: list[float] = []

    def ask(key: str) -> dict[str, Any]:
        return with_server(service, lambda url: ask_all(ServerAddress(url, key), prompts, waits.append))

    usage = ask("")
    first, given, last = (request.salt for request in service.requests)
    assert (first == last != "", given, len(waits)) == (True, "x", 2)
    assert all(request.cache_diagnostics for request in service.requests)
    assert "4 of these tokens could have been cached." in [*sentences(usage)]
    ask("k")
    assert service.requests[-1].salt == ""


def test_misses_are_sentences() -> None:
    miss: dict[str, Any] = {"start": 0, "end": 1216, "seconds": 0.1}
    evicted = {"memory_for": "states", "ago_s": 41.4, "requested_by": "another"}
    misses = [
        {**miss, "end": 9, "reason": "evicted", **evicted},
        {**miss, "reason": "other_text", "differs_at": [1301, 1301], "text": ["of the ", "2nd"]},
        {**miss, "reason": "other_text", "differs_at": [64, 127]},
        {**miss, "reason": "of the future", "end": 2533},
    ]
    found = {"restored_tokens": 0, "matched_tokens": 1280, "cache_missed_tokens": 1216, "misses": misses}
    details = {"cache_diagnostics": [found]}
    lines = [line.strip() for line in sentences({"input_tokens_details": details})]
    assert lines == [
        "The last prompt has 2,533 tokens. 0 were restored, and pages of 1,280 were in memory.",
        "0 to 9: they were evicted 41 s ago for memory of states, for a request of another tenant (0.1 s)",
        "0 to 1,216: an earlier prompt went on otherwise at token 1,301 (0.1 s)",
        "the same until  'of the '",
        "then here       '2nd'",
        "0 to 1,216: an earlier prompt went on otherwise between the tokens 64 and 127 (0.1 s)",
        "0 to 2,533: the reason is of a newer version (0.1 s)",
        "1,216 of these tokens could have been cached.",
    ]
    assert "does not explain" in next(sentences({"prompt_tokens": 3}))
