"""`/cluster/memory` and `tidemill memory`: what workers have, and what a person gives them."""

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying, serving, worker_status
from tests.unit.cluster.edge.requests.test_reading import drawn
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.worker_commands import fetch_memory, render_memory
from tidemill.workers.messages import RequestError

T = TypeVar("T")

MIB = 1 << 20


def service() -> FakeService:
    return FakeService(saying(" a"))


def test_every_worker_reports_its_memory() -> None:
    rows = call(app_over(service()), "GET", "/cluster/memory").json()["workers"]
    assert [row["name"] for row in rows] == ["prefill-0", "decode-0"]
    assert rows[1] == {
        "name": "decode-0",
        "role": "decode",
        "device": "here/cpu",
        "budget_bytes": 4 * MIB,
        "floor_bytes": MIB,
        "max_bytes": 16 * MIB,
        "share_bytes": 8 * MIB,
        "wanted_bytes": 0,
        "set_by": "broker",
        "set_bytes": 5 * MIB,
        "memory": {
            "pages_live": MIB,
            "pages_cached": 0,
            "states_live": 0,
            "states_cached": 0,
            "windows_live": 0,
            "windows_cached": 0,
            "free": 3 * MIB,
            "empty": 0,
            "unmapped": 0,
        },
    }


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"worker": "decode-7", "budget": 1}, 404, "worker"),
        ({"worker": "decode-0"}, 400, "budget"),
        ({"budget": 1}, 400, "worker"),
        ({"worker": "decode-0", "budget": "much"}, 400, "budget"),
        ({"worker": "decode-0", "budget": "9" * 40}, 400, "budget"),
        ({"worker": "decode-0", "budget": 0}, 400, "budget"),
        ({"worker": "decode-0", "budget": -1}, 400, "budget"),
        ({"worker": "decode-0", "budget": 1.5}, 400, "budget"),
        ({"worker": "decode-0", "budget": True}, 400, "budget"),
        ({"worker": "decode-0", "budget": [1]}, 400, "budget"),
        ({"worker": 1, "budget": 1}, 400, "worker"),
        ({"worker": "decode-0", "budget": 1, "wroker": "x"}, 400, "wroker"),
    ],
)
def test_mistakes_name_the_field(body: object, status: int, param: str) -> None:
    here = service()
    response = call(app_over(here), "POST", "/cluster/memory", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert here.budgets == []


def against(service: FakeService, do: Callable[[str], T]) -> T:
    async def main() -> T:
        async with serving(app_over(service)) as url:
            return await asyncio.to_thread(do, url)

    return asyncio.run(main())


def test_table_fits_and_names_are_no_markup() -> None:
    workers = (worker_status("prefill-0", "prefill"), worker_status("[red]decode-1"))
    memory = against(FakeService(saying(" a"), workers=workers), lambda url: fetch_memory(ServerAddress(url)))
    text = drawn(render_memory(memory))
    set_line, held_line = [" ".join(line.split()) for line in text.splitlines() if "prefill-0" in line]
    assert set_line == "prefill-0 prefill broker 4.00 MiB 5.00 MiB 1.00 MiB 16.0 MiB"
    assert held_line == "prefill-0 1.00 MiB 0 B 0 B 0 B 3.00 MiB 0 B 0 B"
    assert text.count("[red]decode-1") == 2
    assert "no worker is alive" in drawn(render_memory({"workers": []}))


def test_command_sets_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    here = service()

    def memory(url: str, *arguments: str) -> str:
        options = cli.parser().parse_args(["memory", "--url", url, *arguments])
        assert options.run(options) == 0
        return capsys.readouterr().out

    def main(url: str) -> None:
        for budget in ("2GiB", "auto"):
            shown = memory(url, "--json", "--worker", "decode-0", "--budget", budget)
            assert len(json.loads(shown)["workers"]) == 2
        assert "decode-0" in memory(url)
        with pytest.raises(RequestError, match="no worker 'decode-7'"):
            memory(url, "--worker", "decode-7", "--budget", "1GiB")

    against(here, main)
    for budget in (512 * MIB, "512MiB"):
        body = {"worker": "decode-0", "budget": budget}
        assert call(app_over(here), "POST", "/cluster/memory", json=body).status_code == 200
    assert here.budgets == [("decode-0", num_bytes) for num_bytes in (2 << 30, None, 512 * MIB, 512 * MIB)]
