"""A detached server outlives its command and kills of its processes, and `tidemill down` leaves nothing."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.e2e.detached import Detached
from tests.support.e2e.faults import RAYLET, REAPER, SUPERVISOR
from tests.support.e2e.history import Ask, Call, asks
from tests.support.e2e.server import eventually, listening_of
from tests.support.e2e.streams import client_of, completion, run_all

pytestmark = pytest.mark.slow

SIZES = ("--mixed", "1", "--memory", "64MiB")
KEYS = ("--api-key", "sk-1")


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    with Detached() as detached:
        assert "`tidemill down` ends it" in detached.serve(*SIZES)
        yield detached


async def streamed(detached: Detached, asked: list[Ask], at_tokens: int, kill: psutil.Process) -> list[Call]:
    """Run all of `asked` concurrently; kill -9 the process when the first call has that many tokens."""
    calls = [Call(ask) for ask in asked]
    async with client_of(detached.url) as client:
        running = [asyncio.create_task(call.run(client, "salt")) for call in calls]
        assert await calls[0].reach(at_tokens), "too late: make the streams longer"
        kill.kill()
        await asyncio.gather(*running)
    return calls


def test_status_finds_the_detached_server(detached: Detached) -> None:
    status, out, err = detached.run("status")
    assert status == 0, err
    assert f"frontend pid {detached.endpoint()}" in out
    assert set(listening_of(detached.processes())) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "already: end it with `tidemill down`"),
        (KEYS, "--api-keys-file"),
        (("--ray-address", "auto"), "Ray"),
    ],
)
def test_second_start_is_refused_in_one_line(detached: Detached, options: tuple[str, ...], line: str) -> None:
    port = detached.url.rpartition(":")[2]
    status, out, err = detached.run("serve", "keeper", "--port", port, *SIZES, "--detach", *options)
    assert (status, out) == (2, "")
    (refusal,) = err.splitlines()
    assert line in refusal
    assert len(list(detached.folder.iterdir())) == 1, "nothing is left of it"


def test_streams_are_unchanged_by_the_loss_of_a_detached_supervisor(detached: Detached) -> None:
    asked = asks(Random(4), 8, num_tokens=100, max_tokens=240)
    endpoint, lives = detached.endpoint(), detached.lives()
    found = asyncio.run(streamed(detached, asked, 20, detached.part(SUPERVISOR)))
    eventually(lambda: detached.run("scale")[0] == 0)
    assert [call.trouble for call in found] == [[] for _ in found]
    assert (detached.endpoint(), detached.lives()) == (endpoint, lives)


def test_fleet_scales_after_the_loss_of_the_supervisor(detached: Detached) -> None:
    """Kill it while a worker starts, and while one leaves."""
    before = detached.lives()
    for count in (2, 1):
        eventually(lambda count=count: detached.run("scale", f"mixed={count}")[0] == 0)
        detached.part(SUPERVISOR).kill()
        eventually(lambda count=count: len(detached.lives()) == count)
    assert detached.lives() == before
    eventually(lambda: detached.run("scale")[0] == 0)


def test_killed_endpoint_is_started_again_and_the_workers_stay(detached: Detached) -> None:
    """Its streams break. The same requests are answered by the next process, from the cache."""
    asked = asks(Random(5), 8, num_tokens=300, max_tokens=4000)
    endpoint, lives = detached.endpoint(), detached.lives()
    found = asyncio.run(streamed(detached, asked, 20, psutil.Process(endpoint)))
    assert any(call.trouble for call in found), "too late: make the streams longer"
    eventually(detached.serves)
    assert detached.endpoint() != endpoint
    maps = psutil.Process(detached.endpoint()).memory_maps()
    assert not [mapped.path for mapped in maps if "libtorch" in mapped.path], (
        "it starts a second faster without"
    )
    assert detached.lives() == lives
    first, second = (asyncio.run(run_all(detached.url, [completion([5] * 300, 8)]))[0] for _ in range(2))
    assert first.outcome == second.outcome
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == 256


def test_down_leaves_nothing(detached: Detached) -> None:
    status, out, err = detached.run("down")
    assert status == 0, err
    assert out.endswith(" has ended\n")
    eventually(detached.nothing_is_left)
    status, _, err = detached.run("down")
    assert (status, err) == (
        2,
        "tidemill: no detached server runs here: `tidemill serve --detach` starts one\n",
    )


def test_server_whose_folder_is_removed_ends_with_all_its_processes() -> None:
    """No worker could start again, and no command finds the server any more."""
    with Detached() as removed:
        removed.serve(*SIZES)
        assert removed.processes()
        root = Path(removed.record.root)
        while root.exists():  # its processes write there meanwhile
            shutil.rmtree(root, ignore_errors=True)
        eventually(removed.nothing_is_left)


def test_server_becomes_ready_without_its_command(detached: Detached) -> None:
    """Kill -9 of the command when the endpoint has begun to start; then end Ray, and the reaper, which would
    remove what is left."""
    with detached.command("serve", "keeper", "--port", "0", *SIZES, "--detach") as starting:
        eventually(lambda: bool(list(detached.folder.glob("*/endpoint.lock"))))
        starting.kill()
    eventually(detached.serves)
    detached.part(REAPER).kill()
    detached.part(RAYLET).kill()
    eventually(lambda: not detached.record.is_running())
    url = detached.url
    _, _, err = detached.run("status")
    assert err.splitlines()[0] == f"tidemill: the detached server at {url} has ended: what it left is removed"
    eventually(detached.nothing_is_left)


def test_failed_start_prints_one_line_and_leaves_nothing(detached: Detached, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, out, err = detached.run("serve", str(tmp_path), "--port", "0", *SIZES, "--detach")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    eventually(detached.nothing_is_left)
