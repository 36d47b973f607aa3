"""Several models behind one endpoint: each name leads to its own fleet, orders to the fleet of the worker."""

from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    call,
    saying,
    worker_status,
)
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.orders import Drain
from tidemill.workers.messages import Unserved

TEXT = "/v1/completions"


class Away(FakeService):
    """Its router does not answer."""

    async def status(self) -> FleetStatus:
        raise Unserved("no answer from the router")


def large() -> FakeService:
    return FakeService(
        saying(" from the large one"),
        model=replace(MODEL, names=("org/large", "large", "gpt")),
        workers=(worker_status("large-prefill-0", "prefill"), worker_status("large-decode-0")),
    )


def small() -> FakeService:
    return FakeService(
        saying(" from the small one"),
        model=replace(MODEL, names=("small",), max_model_len=64),
        workers=(worker_status("small-mixed-0", "mixed"),),
    )


def app_of(*services: FakeService) -> FastAPI:
    return app_over(*services)


def asked(app: FastAPI, **body: object) -> dict[str, Any]:
    return call(app, "POST", TEXT, json={"prompt": "Hello", **body}).json()


@pytest.mark.parametrize("name", ["org/large", "large", "gpt", "small"])
def test_each_name_leads_to_its_fleet(name: str) -> None:
    services = large(), small()
    reply = asked(app_of(*services), model=name)
    asks_small = name == "small"
    assert reply["choices"][0]["text"] == f" from the {'small' if asks_small else 'large'} one"
    assert reply["model"] == ("small" if asks_small else "org/large"), "the first name"
    assert [len(service.requests) for service in services] == [not asks_small, asks_small]


def test_limits_are_those_of_the_model() -> None:
    app = app_of(large(), small())
    prompt = [7] * 100
    assert "choices" in asked(app, model="large", prompt=prompt)
    assert asked(app, model="small", prompt=prompt)["error"]["param"] == "prompt"
    tokenized = call(app, "POST", "/tokenize", json={"model": "small", "prompt": "Hello"}).json()
    assert tokenized["max_model_len"] == 64


def test_model_that_is_not_there_and_none_at_all() -> None:
    app = app_of(large(), small())
    for path, body in ((TEXT, {"prompt": "a"}), ("/detokenize", {"tokens": [7]})):
        unknown = call(app, "POST", path, json={**body, "model": "huge"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert "'org/large', 'large', 'gpt', 'small'" in unknown.json()["error"]["message"]
        missing = call(app, "POST", path, json=body)
        assert missing.status_code == 400
        assert missing.json()["error"]["param"] == "model"
    assert call(app, "GET", "/v1/models/huge").status_code == 404


def test_every_name_is_listed() -> None:
    app = app_of(large(), small())
    listed = call(app, "GET", "/v1/models").json()["data"]
    of_large = [(name, "org/large", 512) for name in ("org/large", "large", "gpt")]
    found = [(entry["id"], entry["root"], entry["max_model_len"]) for entry in listed]
    assert found == [*of_large, ("small", "small", 64)]
    assert call(app, "GET", "/v1/models/org/large").json() == listed[0]
    assert call(app, "GET", "/v1/models/gpt").json() == listed[2]
    with pytest.raises(ValueError, match="'small'"):
        app_of(small(), small())


def test_cluster_shows_the_workers_of_all() -> None:
    cluster = call(app_of(large(), small()), "GET", "/cluster").json()
    assert [row["id"] for row in cluster["models"]] == ["org/large", "small"]
    assert [(row["model"], row["info"]["name"]) for row in cluster["workers"]] == [
        ("org/large", "large-prefill-0"),
        ("org/large", "large-decode-0"),
        ("small", "small-mixed-0"),
    ]


def test_orders_find_their_worker() -> None:
    services = large(), small()
    app = app_of(*services)
    for name, service in (("large-decode-0", services[0]), ("small-mixed-0", services[1])):
        assert call(app, "POST", f"/cluster/workers/{name}/drain", json={}).status_code == 200
        assert service.orders == [Drain(name)]
        assert call(app, "POST", "/cluster/memory", json={"worker": name, "budget": None}).status_code == 200
        assert service.budgets == [(name, None)]
    assert call(app, "POST", "/cluster/workers/nobody/drain", json={}).status_code == 404
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert call(app, "POST", path).status_code == 200
    assert [service.resets for service in services] == [2, 2]


def test_one_fleet_that_is_away_takes_no_other_with_it() -> None:
    away = Away(saying(" a"), model=replace(MODEL, names=("away",)))
    app = app_of(away, small())
    assert call(app, "GET", "/health").status_code == 200
    assert [row["model"] for row in call(app, "GET", "/cluster").json()["workers"]] == ["small"]
    assert "small-mixed-0" in call(app, "GET", "/metrics").text
    both = app_of(away, Away(saying(" a"), model=replace(MODEL, names=("gone",))))
    assert call(both, "GET", "/health").status_code == 503
    assert call(both, "GET", "/metrics").status_code == 200
