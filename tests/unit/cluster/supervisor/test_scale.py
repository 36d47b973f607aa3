"""`tidemill scale`: what people order, beside what load decides; and how the command and the edge take it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying, serving
from tests.unit.cluster.edge.requests.test_reading import drawn
from tests.unit.cluster.supervisor.test_scaler import BUSY, CALM, HYSTERESIS, Case, FakeCluster, settings_of
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.worker_commands import render_roles
from tidemill.cluster.messages import Misses, RoleScale
from tidemill.cluster.settings import FleetSettings, RouterSettings
from tidemill.cluster.supervisor.scaler import IDLE_LOOKS, Scaler
from tidemill.workers.messages import RequestError, Role, Unserved, WorkerLoad

T = TypeVar("T")

ROW: dict[str, Any] = {
    "model": "keeper",
    "role": "decode",
    "starting": [],
    "leaving": [],
    "least": None,
    "most": None,
}


class Fixed(Case):
    """A fleet that nothing scales but people."""

    def __post_init__(self) -> None:
        workers = (settings_of("prefill-0", "prefill"), settings_of("decode-0", "decode"))
        for worker in workers:
            self.cluster.add_worker(worker, RouterSettings())
        self.scaler = Scaler(self.cluster, self.cluster, FleetSettings(workers=workers), Misses)

    async def scale(self, *, pending: bool = False, **counts: int) -> str | None:
        roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "mixed": "mixed"}
        return await self.scaler.scale(
            {roles[role]: number for role, number in counts.items()}, pending=pending
        )

    async def role(self, name: Role) -> RoleScale:
        (found,) = [one for one in await self.scaler.roles() if one.role == name]
        return found


def test_more_are_started_and_fewer_go_when_they_are_empty() -> None:
    async def main() -> None:
        case = Fixed()
        assert await case.scale(prefill=3) is None
        assert case.names() == ["prefill-0", "prefill-1", "prefill-2"]
        case.cluster.workers["prefill-1"] = replace(case.cluster.workers["prefill-1"], load=BUSY)
        case.cluster.all_have(WorkerLoad(running_rows=1))
        await case.scale(prefill=2)
        assert case.cluster.drained == ["prefill-2"], "the newest of equals"
        assert (await case.role("prefill")).leaving == ("prefill-2",)
        assert (await case.role("prefill")).workers == 2
        await case.looks(60)
        assert not case.cluster.removed, "it has a stream still"
        case.cluster.all_have(CALM)
        await case.looks(HYSTERESIS.look_s * IDLE_LOOKS)
        assert case.cluster.removed == ["prefill-2"]
        await case.looks(2 * HYSTERESIS.down_s)
        assert case.names() == ["prefill-0", "prefill-1"], "nothing else changes it"
        assert await case.role("prefill") == RoleScale(role="prefill", workers=2)

    asyncio.run(main())


def test_the_busiest_stay() -> None:
    async def main() -> None:
        case = Fixed()
        await case.scale(prefill=3)
        for name in ("prefill-1", "prefill-2"):
            case.cluster.workers[name] = replace(case.cluster.workers[name], load=BUSY)
        await case.scale(prefill=2)
        assert case.cluster.drained == ["prefill-0"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"mixed": 1}, "--mixed"),
        ({"prefill": 0}, "one prefill worker has to stay"),
        ({"decode": 3, "prefill": 0}, "one prefill worker has to stay"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(counts: dict[str, int], named: str) -> None:
    async def main() -> None:
        case = Fixed()
        with pytest.raises(RequestError, match=named) as refused:
            await case.scale(**counts, pending=False)
        assert refused.value.param == "workers"
        assert len(case.cluster.workers) == 2
        assert not case.cluster.drained

    asyncio.run(main())


@pytest.mark.parametrize(("wanted", "option"), [(1, "--prefill\\)"), (5, "--prefill-max")])
def test_a_role_that_load_scales_stays_inside_its_bounds(wanted: int, option: str) -> None:
    async def main() -> None:
        case = Case(least=2, most=4)
        with pytest.raises(RequestError, match=option):
            await case.scaler.scale({"prefill": wanted}, pending=False)
        await case.scaler.scale({"prefill": 4}, pending=False)
        assert len(case.names()) == 4
        await case.looks(HYSTERESIS.down_s / 2)
        assert len(case.names()) == 4, "load decides from there, as slowly as ever"
        (prefill, _) = await case.scaler.roles()
        assert (prefill.least, prefill.most) == (2, 4)

    asyncio.run(main())


def test_what_has_no_place_is_refused_or_waits_for_one() -> None:
    async def main() -> None:
        case = Fixed(cluster=FakeCluster(free=1))
        with pytest.raises(RequestError, match="decode-2 needs a GPU") as refused:
            await case.scale(decode=3, prefill=1)
        assert (refused.value.status, refused.value.code) == (409, "no_place")
        assert len(case.cluster.workers) == 2, "none is started, not even the one that has a place"
        assert await case.scale(decode=3, pending=True) == "decode-2 needs a GPU"
        assert len(case.cluster.workers) == 4

    asyncio.run(main())


def test_one_that_waits_for_a_place_is_told_to_go_as_well() -> None:
    async def main() -> None:
        case = Fixed()
        await case.scale(decode=2)
        waits = case.cluster.workers.pop("decode-1")  # the router has not heard of it
        assert (await case.role("decode")).starting == ("decode-1",)
        await case.scale(decode=1)
        assert not case.cluster.drained
        assert (await case.role("decode")).leaving == ("decode-1",)
        await case.looks(HYSTERESIS.look_s)
        case.cluster.workers["decode-1"] = waits  # it came up all the same
        await case.looks(HYSTERESIS.look_s)
        assert case.cluster.drained == ["decode-1"]
        await case.looks(HYSTERESIS.look_s * (IDLE_LOOKS + 1))
        assert case.cluster.removed == ["decode-1"]
        await case.scale(decode=2)
        del case.cluster.workers["decode-1"]
        await case.scale(decode=1)
        await case.looks(HYSTERESIS.look_s * IDLE_LOOKS)
        assert case.cluster.forgotten == ["decode-1"]
        assert (await case.role("decode")) == RoleScale(role="decode", workers=1)

    asyncio.run(main())


def test_an_order_goes_for_workers_that_a_person_gave_the_role() -> None:
    async def main() -> None:
        case = Fixed()
        await case.scale(decode=2)
        case.cluster.give("decode-0", "prefill")
        assert (await case.role("prefill")).workers == 1, "not heard yet"
        await case.looks(HYSTERESIS.look_s)
        assert (await case.role("prefill")).workers == 2
        await case.scale(prefill=1)
        assert case.cluster.drained == ["decode-0"]

    asyncio.run(main())


def test_a_worker_that_a_person_drained_may_come_back() -> None:
    async def main() -> None:
        case = Fixed()
        await case.scale(decode=2)
        case.cluster.give("decode-1", state="draining")
        await case.looks(HYSTERESIS.look_s)
        assert (await case.role("decode")).workers == 1
        died = case.cluster.workers.pop("decode-1")
        await case.looks(10 * HYSTERESIS.look_s)
        assert not case.cluster.forgotten, "Ray starts its next life"
        case.cluster.workers["decode-1"] = replace(died, state="ready")
        await case.looks(HYSTERESIS.look_s)
        assert (await case.role("decode")).workers == 2

    asyncio.run(main())


def test_a_router_that_is_away_or_refuses_is_said() -> None:
    async def main() -> None:
        case = Fixed()
        case.cluster.is_away = True
        with pytest.raises(Unserved):
            await case.scale(decode=2)
        case.cluster.is_away = False
        case.cluster.is_full = True
        with pytest.raises(Unserved, match="decode-1 cannot be started"):
            await case.scale(decode=2)
        case.cluster.is_full = False
        await case.scale(decode=2)
        case.cluster.keeps = frozenset({"decode-0", "decode-1"})
        with pytest.raises(RequestError, match="nobody else does its work"):
            await case.scale(decode=1)
        assert (await case.role("decode")).leaving == ()

    asyncio.run(main())


def test_over_http() -> None:
    here = FakeService(saying(" a"))
    app = app_over(here)
    assert call(app, "GET", "/cluster/scale").json() == {"roles": [{**ROW, "workers": 1}]}
    body = {"workers": {"decode": 3}}
    assert call(app, "POST", "/cluster/scale", json=body).json() == {
        "roles": [{**ROW, "workers": 3}],
        "lacks": None,
    }
    waits = call(app, "POST", "/cluster/scale", json={**body, "model": "keeper", "pending": True})
    assert waits.json()["lacks"] == "decode-1 needs a GPU"
    assert here.orders == [({"decode": 3}, False), ({"decode": 3}, True)]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "workers"),
        ({"workers": {}}, 400, "workers"),
        ({"workers": {"decode": -1}}, 400, "workers"),
        ({"workers": {"decode": 5000}}, 400, "workers"),
        ({"workers": {"decode": 1.5}}, 400, "workers"),
        ({"workers": {"decode": True}}, 400, "workers"),
        ({"workers": {"encode": 1}}, 400, "workers"),
        ({"workers": {"mixed": 1}}, 400, "workers"),
        ({"workers": {"decode": 1}, "model": "nobody"}, 404, "model"),
        ({"workers": {"decode": 1}, "wait": 1}, 400, "wait"),
    ],
)
def test_mistakes_name_the_field(body: object, status: int, param: str) -> None:
    here = FakeService(saying(" a"))
    response = call(app_over(here), "POST", "/cluster/scale", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"].split(".")[0] == param
    assert here.orders == []


def against(service: FakeService, do: Callable[[str], T]) -> T:
    async def main() -> T:
        async with serving(app_over(service)) as url:
            return await asyncio.to_thread(do, url)

    return asyncio.run(main())


def test_the_command_orders_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    here = FakeService(saying(" a"))

    def scale(url: str, *arguments: str) -> tuple[int, str]:
        options = cli.parser().parse_args(["scale", "--url", url, *arguments])
        return options.run(options), capsys.readouterr().out

    def main(url: str) -> None:
        assert scale(url) == (0, drawn(render_roles({"roles": [{**ROW, "workers": 1}]})))
        status, out = scale(url, "decode=2", "--pending", "--json")
        assert status == 0
        assert json.loads(out)["lacks"] == "decode-1 needs a GPU"
        assert scale(url, "decode=2", "--wait")[0] == 0
        here.scaled = replace(here.scaled, starting=("decode-1",))
        assert scale(url, "--wait", "0.1", "--model", "keeper")[0] == cli.EXIT_NOT_THERE
        with pytest.raises(RequestError, match="there was no mixed worker"):
            scale(url, "mixed=1")

    against(here, main)
    assert here.orders == [({"decode": 2}, True), ({"decode": 2}, False)]


@pytest.mark.parametrize("word", ["decode", "decode=", "decode=two", "encode=1", "=1", "decode=1=2"])
def test_words_that_say_no_number_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", word]) == cli.EXIT_REFUSED
    assert "like decode=4" in capsys.readouterr().err
    assert cli.main(["scale", "decode=1", "decode=2"]) == cli.EXIT_REFUSED
    assert "was said before" in capsys.readouterr().err


def test_the_table_fits_and_names_are_no_markup() -> None:
    row: dict[str, Any] = {
        "model": "[red]a",
        "role": "decode",
        "workers": 12,
        "leaving": [],
        "least": 1,
        "most": 16,
    }
    found: dict[str, Any] = {
        "roles": [
            {**row, "starting": [f"decode-{index}" for index in range(10, 12)]},
            {**row, "model": "b", "starting": [], "most": None},
        ],
        "lacks": "decode-11 needs [GPU: 1]",
    }
    text = drawn(render_roles(found))
    assert "[red]a decode 12 decode-10, decode-11 - 1 to 16" in " ".join(text.split())
    assert "b decode 12 - - -" in " ".join(text.split())
    assert "waits for a place: decode-11 needs [GPU: 1]" in text
