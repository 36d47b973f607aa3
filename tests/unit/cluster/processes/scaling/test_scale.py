"""`tidemill scale`: the command of an operator at the edge and in the CLI."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying, with_server
from tests.unit.cluster.edge.requests.test_reading import drawn
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.fleet import EXIT_NOT_ALL
from tidemill.cluster.cli.worker_commands import render_roles
from tidemill.cluster.orders import Scale
from tidemill.workers.messages import RequestError


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
    row: dict[str, Any] = {"model": "keeper", "role": "decode", "starting": [], "leaving": []}
    row |= {"least": None, "most": None}

    def scale(url: str, *arguments: str) -> tuple[int, str]:
        options = cli.parser().parse_args(["scale", "--url", url, *arguments])
        return options.run(options), capsys.readouterr().out

    def main(url: str) -> None:
        assert scale(url) == (0, drawn(render_roles({"roles": [{**row, "workers": 1}]})))
        status, out = scale(url, "decode=2", "--pending", "--json")
        assert (status, json.loads(out)) == (
            0,
            {"roles": [{**row, "workers": 2}], "lacks": "decode-1 needs a GPU"},
        )
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
