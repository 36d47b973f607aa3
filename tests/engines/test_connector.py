"""Real vLLMs over one store: a server loads what another one has saved, and its answers are those of a vLLM
without a store, whatever the store does."""

from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
import pytest
from benchmarks.engines.scene import Running, Scene
from benchmarks.engines.stored import connector
from benchmarks.peers.works import drawn
from prometheus_client.parser import text_string_to_metric_families

from tests.support.mooncake import Mooncake, end, frozen, is_asked, mooncake, slowed
from tests.support.waits import EVENTUALLY_S_MAX, eventually
from tidemill.kvstore.stores.seal import SEAL_BYTES

LENT_BYTES = 512 << 20
PROMPTS = 32
NAMES = "vllm:tidemill_"
MODELS = {"dense": (1300, ()), "hybrid": (2300, ("--mamba-cache-mode", "align"))}
"""The tokens of a prompt, some more than 1,024 in whole blocks, and the flags of each model."""


def answer(server: Running, prompt: tuple[int, ...], max_tokens: int = 16) -> tuple[str, int]:
    """Return a greedy answer, and how many tokens of the prompt were not computed for it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=EVENTUALLY_S_MAX)
    assert reply.status_code == httpx.codes.OK, reply.text
    found = reply.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def counts(server: Running) -> Counter[str]:
    """Return the connector's counters, by their names and the values of their labels."""
    answer(server, (7, 8, 9), 4)  # counts arrive with later steps
    text = httpx.get(f"{server.url}/metrics", timeout=EVENTUALLY_S_MAX).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = Counter[str]()
    for name, labels, value, *_ in samples:
        if name.startswith(NAMES) and name.endswith("_total"):
            words = [labels[label] for label in ("operation", "outcome") if label in labels]
            found[" ".join([name.removeprefix(NAMES).removesuffix("_total"), *words])] = int(value)
    return found


class Saved(NamedTuple):
    """A prompt that the first server has saved, the answers of the vLLM alone, and its objects' names."""

    prompt: tuple[int, ...]
    expected: set[str]
    objects: set[str]


@dataclass
class Servers:
    """A vLLM that saves into both stores, one that has each of them, `start` for one more, and prompts that
    none has seen, with the answers of a vLLM alone: computed, and from its own cache, of the first prompt
    also from parts of it."""

    prompts: list[tuple[tuple[int, ...], set[str]]]
    first: Running
    second: dict[str, Running]
    start: Callable[[str], Running]
    folder: Path
    service: Mooncake
    keeps_states: bool

    def names(self, store: str) -> set[str]:
        """Return the names of the objects in a store."""
        if store == "mooncake":
            return set(self.service.ask("/get_all_keys").split())
        return {path.name for path in self.folder.glob("objects/*/*")}

    def save(self, store: str) -> Saved:
        """Let the first server save a new prompt. A store that was down takes objects after a while, then of
        a later prompt."""
        while True:
            prompt, expected = self.prompts.pop()
            before = self.names("folder") | self.names(store)
            ended = saves(self.first)
            for _ in range(3):  # vLLM keeps states for what it meets again
                assert answer(self.first, prompt)[0] in expected
            eventually(lambda: self._has_saved(before, ended))  # noqa: B023 - called in this round
            if (new := self.names(store) - before) >= self.names("folder") - before:
                return Saved(prompt, expected, new)

    def _has_saved(self, before: set[str], ended: int) -> bool:
        new = self.names("folder") - before
        has_state = any(name.endswith(".c") for name in new) or not self.keeps_states
        return bool(new) and has_state and saves(self.first) - ended >= len(new)


def empty(server: Running) -> None:
    """Empty the own cache of a server."""
    url = f"{server.url}/reset_prefix_cache"
    eventually(lambda: httpx.post(url, timeout=EVENTUALLY_S_MAX).json()["success"])


def loads(server: Running, saved: Saved) -> bool:
    """Return whether a server with an empty cache of its own loads a prompt. Its answer is as expected."""
    empty(server)
    text, loaded_tokens = answer(server, saved.prompt)
    assert text in saved.expected
    return loaded_tokens >= 1024


def saves(server: Running) -> int:
    """Return the number of objects whose save has ended."""
    return sum(count for name, count in counts(server).items() if name.startswith("objects save"))


@pytest.fixture(scope="module", params=MODELS)
def servers(
    request: pytest.FixtureRequest, vllm_python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Servers]:
    prompt_tokens, flags = MODELS[request.param]
    scene = Scene(vllm_python, models, request.param)
    folder = tmp_path_factory.mktemp("pages")
    with ExitStack() as stack:
        service = stack.enter_context(mooncake(folder / "mooncake.log", LENT_BYTES))
        stores = {
            "folder": f"file://{folder}?size=8GiB",
            "mooncake": f"mooncake://{service.address}?ports=open",
        }

        more = ("--enable-prompt-tokens-details", *flags)

        def start(*names: str) -> Running:
            url = ",".join(stores[name] for name in names)
            return stack.enter_context(scene.vllm(*more, "--kv-transfer-config", connector(url)))

        rng = Random(0)
        prompts = [drawn(rng, prompt_tokens) for _ in range(PROMPTS)]
        with scene.vllm(*more) as plain:
            answers = [{answer(plain, prompt)[0] for _ in range(3)} for prompt in prompts]
            for length in range(128, prompt_tokens, 128):  # where a part is cached, sums round differently
                empty(plain)
                answer(plain, prompts[0][:length], 1)
                answers[0].add(answer(plain, prompts[0])[0])
        second = {name: start(name) for name in stores}
        first, unseen = start(*stores), [*zip(prompts, answers, strict=True)]
        yield Servers(unseen, first, second, start, folder, service, bool(flags))


def flip_files(servers: Servers, objects: set[str]) -> None:
    for name in objects:
        [path] = servers.folder.glob(f"objects/*/{name}")
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def flip_memory(servers: Servers, objects: set[str]) -> None:
    for name in objects:
        servers.service.flip(name, SEAL_BYTES + 5)


@pytest.mark.parametrize("store", ["folder", "mooncake"])
def test_second_server_loads_what_the_first_has_saved(servers: Servers, store: str) -> None:
    saved, second = servers.save(store), servers.second[store]
    before = counts(second)
    text, loaded_tokens = answer(second, saved.prompt)
    assert text in saved.expected
    assert loaded_tokens >= 1024
    new = counts(second) - before
    assert new["loads whole"] == 1, new
    assert new["objects load hit"] >= (2 if servers.keeps_states else loaded_tokens // 128), new
    assert not new["loads failed"]


@pytest.mark.parametrize(
    ("store", "spoil", "counter"),
    [("folder", flip_files, "objects load corrupt"), ("mooncake", flip_memory, "objects load corrupt")],
)
def test_damaged_objects_are_computed(
    servers: Servers, store: str, spoil: Callable[[Servers, set[str]], None], counter: str
) -> None:
    saved, second = servers.save(store), servers.second[store]
    before = counts(second)
    spoil(servers, saved.objects)
    assert answer(second, saved.prompt)[0] in saved.expected
    new = counts(second) - before
    assert new[counter] >= 1, new
    assert new["loads failed"] == 1, new


@pytest.mark.parametrize("part", ["owner", "master"])
def test_mooncake_that_stands_still_is_not_waited_for(servers: Servers, part: str) -> None:
    saved, second = servers.save("mooncake"), servers.second["mooncake"]
    before = counts(second)
    process = servers.service.master if part == "master" else servers.service.owners[0]
    with frozen(process):
        assert answer(second, saved.prompt)[0] in saved.expected
        new = counts(second) - before
    trips = 2 if part == "master" else 1  # the scheduler asks the master, too, with a breaker of its own
    assert new["trips"] == trips, new
    assert new["loads failed"] == (part == "owner"), new
    again = servers.save("mooncake")
    eventually(lambda: loads(second, again))


def test_mooncake_that_has_ended_is_not_waited_for(servers: Servers) -> None:
    saved, second = servers.save("mooncake"), servers.second["mooncake"]
    before = counts(second)
    end(servers.service.master)
    assert answer(second, saved.prompt)[0] in saved.expected
    assert (counts(second) - before)["trips"] == 1
    servers.service.start_master()


@pytest.mark.parametrize(
    ("part", "counted"), [("owner", {"trips", "loads failed", "objects load hit"}), ("master", {"trips"})]
)
def test_mooncake_that_is_slow_is_not_waited_for(servers: Servers, part: str, counted: set[str]) -> None:
    saved, second = servers.save("mooncake"), servers.second["mooncake"]
    before = counts(second)

    def was_late() -> bool:
        loads(second, saved)
        return counted <= (counts(second) - before).keys()

    with slowed(servers.service.master if part == "master" else servers.service.owners[0]):
        eventually(was_late)
        prompt, expected = servers.prompts.pop()
        assert answer(servers.first, prompt)[0] in expected  # saves late
    assert not (counts(second) - before)["objects load corrupt"]
    again = servers.save("mooncake")
    eventually(lambda: loads(second, again))


def test_mooncake_owner_that_is_killed_amid_a_load_is_replaced(servers: Servers) -> None:
    saved, second, owner = servers.save("mooncake"), servers.second["mooncake"], servers.service.owners[0]
    before = counts(second)
    with ThreadPoolExecutor(1) as asking, frozen(owner):
        asked = asking.submit(answer, second, saved.prompt)
        eventually(lambda: is_asked(owner))
        end(servers.service.owners.pop())
    assert asked.result()[0] in saved.expected
    new = counts(second) - before
    assert (new["loads whole"], new["loads failed"]) == (0, 1), new
    eventually(lambda: not servers.names("mooncake"))
    servers.service.start_owner()
    again = servers.save("mooncake")
    eventually(lambda: loads(second, again))


def test_server_that_is_killed_amid_a_load_harms_no_object(servers: Servers) -> None:
    saved, second, owner = servers.save("mooncake"), servers.second["mooncake"], servers.service.owners[0]
    with ThreadPoolExecutor(1) as asking, frozen(owner):
        asked = asking.submit(answer, second, saved.prompt, 1000)
        eventually(lambda: is_asked(owner))
        for process in [*second.root.children(recursive=True), second.root]:
            process.kill()
        with pytest.raises(httpx.HTTPError):
            asked.result()
    servers.save("mooncake")  # the first server answers
    third = servers.second["mooncake"] = servers.start("mooncake")
    assert loads(third, saved)
    assert not counts(third)["loads failed"]


def test_killed_server_leaves_whole_objects(servers: Servers) -> None:
    """It is killed amid its saves: some files are there, and Mooncake's transfer hangs."""
    kept = {store: servers.save(store) for store in servers.second}
    prompt, expected = servers.prompts[0]
    before = servers.names("folder")
    with ThreadPoolExecutor(1) as asking, frozen(servers.service.owners[0]):
        asked = asking.submit(answer, servers.first, prompt, 1000)
        eventually(lambda: bool(servers.names("folder") - before))
        for process in [*servers.first.root.children(recursive=True), servers.first.root]:
            process.kill()
        with pytest.raises(httpx.HTTPError):
            asked.result()
    for store, second in servers.second.items():
        start = counts(second)
        assert answer(second, prompt)[0] in expected
        assert loads(second, kept[store])
        assert not (counts(second) - start)["objects load corrupt"]
