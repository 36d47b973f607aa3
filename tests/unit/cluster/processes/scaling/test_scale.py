"""`tidemill scale`: the operator's command in the scaler, at the edge and in the CLI."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tests.support.cluster.served import with_server
from tests.support.grpc_loop import in_loop
from tests.unit.cluster.edge.requests.test_reading import drawn
from tests.unit.cluster.processes.scaling.test_scaler import (
    BUSY,
    HYSTERESIS,
    IDLE,
    Case,
    FakeCluster,
    worker_settings,
)
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.fleet import EXIT_NOT_ALL
from tidemill.cluster.cli.worker_commands import render_roles
from tidemill.cluster.messages import RoleScale
from tidemill.cluster.orders import Scale
from tidemill.cluster.processes.scaling.autoscaling import EdgeReports
from tidemill.cluster.processes.scaling.journal import initial_plan
from tidemill.cluster.processes.scaling.scaler import IDLE_CHECKS, Scaler
from tidemill.cluster.settings import FleetSettings, RouterSettings
from tidemill.workers.messages import RequestError, Role, Unserved, WorkerLoad

ROW: dict[str, Any] = {
    "model": "keeper",
    "role": "decode",
    "starting": [],
    "leaving": [],
    "least": None,
    "most": None,
}


class ManualCase(Case):
    """A fleet without bounds, which only an operator scales."""

    def __post_init__(self) -> None:
        workers = (worker_settings("prefill-0", "prefill"), worker_settings("decode-0", "decode"))
        for worker in workers:
            self.cluster.add_worker(worker, RouterSettings())
        fleet = FleetSettings(workers=workers)
        self.scaler = Scaler(self.cluster, self.cluster, fleet, EdgeReports(), initial_plan(fleet))

    async def scale(self, *, pending: bool = False, **counts: int) -> str | None:
        roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "mixed": "mixed"}
        return await self.scaler.scale(
            {roles[role]: number for role, number in counts.items()}, pending=pending
        )

    async def role(self, name: Role) -> RoleScale:
        (scale,) = [scale for scale in await self.scaler.roles() if scale.role == name]
        return scale


@in_loop
async def test_scaler_starts_and_drains_workers_on_command() -> None:
    case = ManualCase()
    assert await case.scale(prefill=3) is None
    assert case.names() == ["prefill-0", "prefill-1", "prefill-2"]
    case.cluster.workers["prefill-1"] = replace(case.cluster.workers["prefill-1"], load=BUSY)
    case.cluster.set_load(WorkerLoad(running_rows=1))
    await case.scale(prefill=2)
    assert case.cluster.drained == ["prefill-2"], "the newest of equally loaded workers"
    assert (await case.role("prefill")).leaving == ("prefill-2",)
    assert (await case.role("prefill")).workers == 2
    await case.advance(60)
    assert not case.cluster.removed, "it still has a stream"
    case.cluster.set_load(IDLE)
    await case.advance(HYSTERESIS.look_s * IDLE_CHECKS)
    assert case.cluster.removed == ["prefill-2"]
    await case.advance(2 * HYSTERESIS.down_s)
    assert case.names() == ["prefill-0", "prefill-1"], "load does not change it"
    assert await case.role("prefill") == RoleScale(role="prefill", workers=2)


@in_loop
async def test_scaler_drains_least_loaded_worker() -> None:
    case = ManualCase()
    await case.scale(prefill=3)
    for name in ("prefill-1", "prefill-2"):
        case.cluster.workers[name] = replace(case.cluster.workers[name], load=BUSY)
    await case.scale(prefill=2)
    assert case.cluster.drained == ["prefill-0"]


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"mixed": 1}, "--mixed"),
        ({"prefill": 0}, "one prefill worker has to stay"),
        ({"decode": 3, "prefill": 0}, "one prefill worker has to stay"),
    ],
)
@in_loop
async def test_scaler_refuses_impossible_counts_and_changes_nothing(
    counts: dict[str, int], named: str
) -> None:
    case = ManualCase()
    with pytest.raises(RequestError, match=named) as refused:
        await case.scale(**counts, pending=False)
    assert refused.value.param == "workers"
    assert len(case.cluster.workers) == 2
    assert not case.cluster.drained


@pytest.mark.parametrize(("wanted", "option"), [(1, "--prefill\\)"), (5, "--prefill-max")])
@in_loop
async def test_scaler_keeps_operator_within_bounds_of_role_scaled_by_load(wanted: int, option: str) -> None:
    case = Case(least=2, most=4)
    with pytest.raises(RequestError, match=option):
        await case.scaler.scale({"prefill": wanted}, pending=False)
    await case.scaler.scale({"prefill": 4}, pending=False)
    assert len(case.names()) == 4
    await case.advance(HYSTERESIS.down_s / 2)
    assert len(case.names()) == 4, "load shrinks it as slowly as before"
    (prefill, _) = await case.scaler.roles()
    assert (prefill.least, prefill.most) == (2, 4)


@in_loop
async def test_scaler_refuses_unschedulable_workers_unless_pending() -> None:
    case = ManualCase(cluster=FakeCluster(free=1))
    with pytest.raises(RequestError, match="decode-2 needs a GPU") as refused:
        await case.scale(decode=3, prefill=1)
    assert (refused.value.status, refused.value.code) == (409, "no_place")
    assert len(case.cluster.workers) == 2, "none is started, not even the schedulable one"
    assert await case.scale(decode=3, pending=True) == "decode-2 needs a GPU"
    assert len(case.cluster.workers) == 4


@in_loop
async def test_scaler_drains_starting_worker_once_router_reports_it() -> None:
    case = ManualCase()
    await case.scale(decode=2)
    starting = case.cluster.workers.pop("decode-1")  # the router does not know it
    assert (await case.role("decode")).starting == ("decode-1",)
    await case.scale(decode=1)
    assert not case.cluster.drained
    assert (await case.role("decode")).leaving == ("decode-1",)
    await case.advance(HYSTERESIS.look_s)
    case.cluster.workers["decode-1"] = starting  # it started nevertheless
    await case.advance(HYSTERESIS.look_s)
    assert case.cluster.drained == ["decode-1"]
    await case.advance(HYSTERESIS.look_s * (IDLE_CHECKS + 1))
    assert case.cluster.removed == ["decode-1"]
    await case.scale(decode=2)
    del case.cluster.workers["decode-1"]
    await case.scale(decode=1)
    await case.advance(HYSTERESIS.look_s * IDLE_CHECKS)
    assert case.cluster.forgotten == ["decode-1"]
    assert (await case.role("decode")) == RoleScale(role="decode", workers=1)


@in_loop
async def test_scaler_applies_command_to_workers_moved_to_role() -> None:
    case = ManualCase()
    await case.scale(decode=2)
    case.cluster.change("decode-0", "prefill")
    assert (await case.role("prefill")).workers == 1, "not reported yet"
    await case.advance(HYSTERESIS.look_s)
    assert (await case.role("prefill")).workers == 2
    await case.scale(prefill=1)
    assert case.cluster.drained == ["decode-0"]


@in_loop
async def test_scaler_without_bounds_keeps_drained_worker_that_is_gone() -> None:
    case = ManualCase()
    await case.scale(decode=2)
    case.cluster.change("decode-1", state="draining")
    await case.advance(HYSTERESIS.look_s)
    assert (await case.role("decode")).workers == 1
    gone = case.cluster.workers.pop("decode-1")
    await case.advance(10 * HYSTERESIS.look_s)
    assert not case.cluster.forgotten, "Ray restarts it"
    case.cluster.workers["decode-1"] = replace(gone, state="ready")
    await case.advance(HYSTERESIS.look_s)
    assert (await case.role("decode")).workers == 2


@in_loop
async def test_scaler_reports_router_that_is_away_or_refuses() -> None:
    case = ManualCase()
    case.cluster.is_away = True
    with pytest.raises(Unserved):
        await case.scale(decode=2)
    case.cluster.is_away = False
    case.cluster.is_full = True
    with pytest.raises(Unserved, match="decode-1 cannot be started"):
        await case.scale(decode=2)
    case.cluster.is_full = False
    await case.scale(decode=2)
    case.cluster.refuses_drain = frozenset({"decode-0", "decode-1"})
    with pytest.raises(RequestError, match="no other worker does its work"):
        await case.scale(decode=1)
    assert (await case.role("decode")).leaving == ()


def test_edge_answers_scale_requests() -> None:
    service = FakeService(saying(" a"))
    app = app_over(service)
    assert call(app, "GET", "/cluster/scale").json() == {"roles": [{**ROW, "workers": 1}]}
    body = {"workers": {"decode": 3}}
    assert call(app, "POST", "/cluster/scale", json=body).json() == {
        "roles": [{**ROW, "workers": 3}],
        "lacks": None,
    }
    starting = call(app, "POST", "/cluster/scale", json={**body, "model": "keeper", "pending": True})
    assert starting.json()["lacks"] == "decode-1 needs a GPU"
    assert service.orders == [Scale({"decode": 3}), Scale({"decode": 3}, pending=True)]


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
def test_edge_names_field_of_invalid_scale_request(body: object, status: int, param: str) -> None:
    service = FakeService(saying(" a"))
    response = call(app_over(service), "POST", "/cluster/scale", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"].split(".")[0] == param
    assert service.orders == []


def test_scale_command_orders_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService(saying(" a"))

    def scale(url: str, *arguments: str) -> tuple[int, str]:
        options = cli.parser().parse_args(["scale", "--url", url, *arguments])
        return options.run(options), capsys.readouterr().out

    def main(url: str) -> None:
        assert scale(url) == (0, drawn(render_roles({"roles": [{**ROW, "workers": 1}]})))
        status, out = scale(url, "decode=2", "--pending", "--json")
        assert status == 0
        assert json.loads(out)["lacks"] == "decode-1 needs a GPU"
        assert scale(url, "decode=2", "--wait")[0] == 0
        service.scaled = replace(service.scaled, starting=("decode-1",))
        assert scale(url, "--wait", "0.1", "--model", "keeper")[0] == EXIT_NOT_ALL
        with pytest.raises(RequestError, match="there was no mixed worker"):
            scale(url, "mixed=1")

    with_server(service, main)
    assert service.orders == [Scale({"decode": 2}, pending=True), Scale({"decode": 2})]


@pytest.mark.parametrize("word", ["decode", "decode=", "decode=two", "encode=1", "=1", "decode=1=2"])
def test_scale_command_refuses_words_without_count(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", word]) == cli.EXIT_REFUSED
    assert "like decode=4" in capsys.readouterr().err
    assert cli.main(["scale", "decode=1", "decode=2"]) == cli.EXIT_REFUSED
    assert "is given twice" in capsys.readouterr().err


def test_roles_table_fits_and_escapes_names() -> None:
    row: dict[str, Any] = {
        "model": "[red]a",
        "role": "decode",
        "workers": 12,
        "leaving": [],
        "least": 1,
        "most": 16,
    }
    answer: dict[str, Any] = {
        "roles": [
            {**row, "starting": [f"decode-{index}" for index in range(10, 12)]},
            {**row, "model": "b", "starting": [], "most": None},
        ],
        "lacks": "decode-11 needs [GPU: 1]",
    }
    text = drawn(render_roles(answer))
    assert "[red]a decode 12 decode-10, decode-11 - 1 to 16" in " ".join(text.split())
    assert "b decode 12 - - -" in " ".join(text.split())
    assert "waits for capacity: decode-11 needs [GPU: 1]" in text
