"""Why a prompt was not cached, in the words of a running fleet: a hybrid on two workers without a store."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.support.e2e.server import NO_TLS, Server, eventually, run_cli
from tests.support.e2e.streams import completion, random_prompt

PAGE = 64
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers with memory for few prompts, and a store that takes nothing."""
    folder = tmp_path_factory.mktemp("why")
    sized = ["--mixed", "2", "--memory", "4MiB", "--max-model-len", "1024"]
    store = ["--store", f"file://{folder / 'store'}?size=4KiB"]
    with Server(["keeper", "--port", "0", *sized, *store], folder / "log") as server:
        yield server


def send(server: Server, prompt: list[int], key: str) -> httpx.Response:
    headers = {"x-cache-diagnostics": "text", **({"authorization": f"Bearer {key}"} if key else {})}
    url, body = f"{server.url}/v1/completions", completion(prompt, 2)
    reply = httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S, verify=NO_TLS)
    assert reply.status_code == 200, reply.text
    return reply


class Asked:
    """An answer: why it was not cached, for its client and for an operator."""

    def __init__(self, server: Server, prompt: list[int], key: str = "sk-a") -> None:
        reply = send(server, prompt, key)
        (self.client,) = reply.json()["usage"]["prompt_tokens_details"]["cache_diagnostics"]
        url = f"{server.url}/cluster/requests/{reply.headers['x-request-id']}"
        self.row: dict[str, Any] = httpx.get(url, timeout=TIMEOUT_S, verify=NO_TLS).json()
        (self.operator,) = self.row["cache_diagnostics"]

    @property
    def reasons(self) -> list[tuple[str, int, int]]:
        return [(miss["reason"], miss["start"], miss["end"]) for miss in self.client["misses"]]


def test_each_reason_is_found_where_it_arises(fleet: Server, tmp_path: Path) -> None:
    rng = Random(1)
    prompt = random_prompt(rng, 640)
    last = ("last_page", 576, 640)
    first = Asked(fleet, prompt)
    assert first.reasons == [("never_seen", 0, 576), last]
    holder = first.row["decode"]

    def is_announced() -> bool:
        return any(row["restorable_depths"] for row in fleet.workers() if row["info"]["worker"] == holder)

    eventually(is_announced)
    name = holder.rpartition(".")[0]
    drained = httpx.post(f"{fleet.url}/cluster/workers/{name}/drain", json={}, timeout=TIMEOUT_S)
    assert drained.status_code == 200, drained.text
    eventually(lambda: "draining" in {row["state"] for row in fleet.workers()})

    moved = Asked(fleet, prompt)
    assert moved.reasons == [("other_worker", 0, 576), last]
    assert moved.row["decode"] != holder
    assert [miss["elsewhere"] for miss in moved.operator["misses"]] == [holder, None]
    assert holder not in str(moved.client), "clients learn no names"
    hit = Asked(fleet, prompt)
    assert (hit.reasons, hit.client["reason"], hit.client["cache_missed_tokens"]) == ([last], "hit", 0)

    left = Asked(fleet, prompt[:200] + random_prompt(rng, 200))
    assert (left.client["matched_tokens"], left.client["restored_tokens"]) == (192, 0)
    assert left.reasons[:2] == [("no_checkpoint", 0, 192), ("other_text", 192, 384)]
    again = Asked(fleet, prompt[:200] + random_prompt(rng, 200))
    assert again.reasons == [("other_text", 192, 384), ("last_page", 384, 400)]
    assert again.client["misses"][0]["differs_at"] == [200, 200]
    assert all(again.client["misses"][0]["text"])
    unnamed = Asked(fleet, prompt[:200] + random_prompt(rng, 200), key="")
    assert unnamed.client["misses"][0]["differs_at"] == [192, 255], "a page, without a tenant"

    kept_once = random_prompt(rng, 640)
    Asked(fleet, kept_once)
    for _ in range(150):
        send(fleet, random_prompt(rng, 70), key="sk-b")
    lost = Asked(fleet, kept_once)
    evicted = lost.client["misses"][0]
    assert (evicted["reason"], evicted.get("requested_by")) == ("evicted", "another"), lost.client
    assert evicted.get("memory_for") in {"pages", "states"}, "whatever that request lacked first"
    assert lost.operator["misses"][0]["evicted_for"] not in {"", None}

    file = tmp_path / "prompts.jsonl"
    bodies = [completion(prompt[:200] + random_prompt(rng, 200), 2) for _ in range(2)]
    file.write_text("\n".join(map(json.dumps, bodies)))
    ended, _ = run_cli("why", str(file), "--url", fleet.url)
    assert ended.returncode == 0, ended.stderr
    words = " ".join(ended.stdout.split())
    assert "an earlier prompt went on otherwise at token 200" in words
    assert "their pages are in memory, but this model resumes only at a checkpoint" in words
    counted = httpx.get(f"{fleet.url}/metrics", timeout=TIMEOUT_S).text
    labels = 'model_name="keeper",reason="other_worker"'
    assert f"tidemill:computed_prompt_tokens_total{{{labels}}} 576.0" in counted
