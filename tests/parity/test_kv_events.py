"""The subscriber of docs/kv_events.md mirrors the prefix indexes of workers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.e2e.server import EVENTUALLY_S_MAX, NO_TLS, Server, eventually
from tests.support.e2e.streams import cached_of, completion, random_prompt, run_all
from tests.support.workers.subscriber import Subscriber, documented_subscriber

PAGE_TOKENS = 16
SIZES = ("--mixed", "2", "--memory", "8MiB", "--page-size", str(PAGE_TOKENS), "--max-model-len", "600")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sockets of the workers of `server`."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/live",
        "replay_endpoint": f"ipc://{folder}/past",
    }
    arguments = ["keeper", "--port", "0", *SIZES, "--kv-events-config", json.dumps(events)]
    with Server(arguments, folder / "log") as server:
        yield server


def complete(server: Server, num_prompts: int) -> None:
    prompts = [f"{number % 5} keepers of a lighthouse " * 6 for number in range(num_prompts)]
    asyncio.run(run_all(server.url, [completion(prompt, 8) for prompt in prompts]))


def cached(server: Server, prompt: list[int]) -> int:
    return cached_of(server.url, completion(prompt, 8))


def subscribers_of(folder: Path) -> dict[str, Subscriber]:
    code = documented_subscriber()
    return {
        name: code.Subscriber(f"ipc://{folder}/live{suffix}", f"ipc://{folder}/past{suffix}")
        for name, suffix in (("mixed-0", ""), ("mixed-1", ".1"))
    }


def depths_of(subscriber: Subscriber, prompt: list[int]) -> tuple[int, int]:
    """Return in tokens how deep the mirror has pages of a prompt, and where it resumes."""
    children = {(parent, tuple(tokens)): key for key, (parent, tokens) in subscriber.mirror.pages.items()}
    depth = resumes = 0
    key: bytes | None = None
    while key := children.get((key, tuple(prompt[depth : depth + PAGE_TOKENS]))):
        depth += PAGE_TOKENS
        if key in subscriber.mirror.restorable:
            resumes = depth
    return depth, resumes


def receive_all(subscribers: dict[str, Subscriber]) -> None:
    for subscriber in subscribers.values():
        while subscriber.receive(200):
            pass


def test_depths_of_a_family_are_those_of_checkpoints_and_not_of_pages(server: Server, folder: Path) -> None:
    """The second prompt leaves the first inside: it resumes above where their common pages end.

    Its end is a checkpoint, at which the third one resumes.
    """
    rng = Random(1)
    shared, *rests = (random_prompt(rng, count) for count in (180, 100, 100, 100))
    first, second, third = (shared + rest for rest in rests)
    names = {
        "prefix_found_tokens": "tidemill:worker_prefix_found_tokens",
        "prefix_resumed_tokens": "tidemill:worker_prefix_resumed_tokens",
    }

    def shown() -> dict[str, float]:
        """Return what /metrics states."""
        text = httpx.get(f"{server.url}/metrics", timeout=EVENTUALLY_S_MAX, verify=NO_TLS).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        depth = "tidemill:request_restorable_hit_depth_tokens_sum"
        return {
            **{
                name: sum(sample.value for sample in samples if sample.name == f"{names[name]}_total")
                for name in names
            },
            "hit_depth": sum(sample.value for sample in samples if sample.name == depth),
        }

    subscribers = subscribers_of(folder)
    server.drain("mixed-1", wanted=True)  # a router may let it restore what the busy one has computed
    try:
        assert cached(server, first) == 0
        eventually(lambda: shown() == {**{name: server.counter(name) for name in names}, "hit_depth": 0})
        before = shown()
        receive_all(subscribers)
        assert {name: depths_of(subscriber, second) for name, subscriber in subscribers.items()} == {
            "mixed-0": (176, 128),
            "mixed-1": (0, 0),
        }
        assert cached(server, second) == 128
        after = {"prefix_found_tokens": 176.0, "prefix_resumed_tokens": 128.0, "hit_depth": 128.0}
        eventually(lambda: shown() == {name: before[name] + more for name, more in after.items()})
        assert {name: server.counter(name) - before[name] for name in names}.items() <= after.items()
        receive_all(subscribers)
        assert {name: depths_of(subscriber, third) for name, subscriber in subscribers.items()} == {
            "mixed-0": (176, 176),
            "mixed-1": (0, 0),
        }
        assert cached(server, third) == 176
    finally:
        server.drain("mixed-1", wanted=False)
        for subscriber in subscribers.values():
            subscriber.close()


def test_mirrors_equal_the_reports_of_workers(server: Server, folder: Path) -> None:
    subscribers = subscribers_of(folder)

    def are_equal() -> bool:
        receive_all(subscribers)
        found = {name: len(subscriber.mirror.restorable) for name, subscriber in subscribers.items()}
        return found == {row["info"]["name"]: row["restorable_depths"] for row in server.workers()}

    try:
        complete(server, 20)
        eventually(are_equal)
        assert any(subscriber.mirror.restorable for subscriber in subscribers.values())
        assert 0 < server.counter("prefix_found_tokens") <= server.counter("prefix_queried_tokens")
        assert 0 < server.counter("prefix_resumed_tokens") <= server.counter("prefix_queried_tokens")
        server.replace_workers()
        complete(server, 3)
        eventually(are_equal)
    finally:
        for subscriber in subscribers.values():
            subscriber.close()
