"""Each row of the tables of endpoints and fields in docs/api.md, sent to an edge."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.cluster.fake_service import MODEL, FakeService, app_over, post, saying
from tests.unit.cluster.edge.apis.served_fields import (
    BODIES,
    COMMAND,
    PAGE,
    POOLING,
    example,
    field_rows,
    in_page,
)
from tidemill.workers.messages import Pooling

GENERATES = FakeService(saying("a"))
POOLS = FakeService(
    saying("a"), pooled=lambda _: [1.0] * 4, model=replace(MODEL, pooling=Pooling(kind="embed", size=4))
)
FIELDS = [(row.path, row.field, row.verdict) for row in field_rows()]


def test_tables_are_those_of_the_code() -> None:
    assert PAGE.read_text() == in_page(), f"renew the tables: {COMMAND}"
    assert len(FIELDS) > 250


@pytest.mark.parametrize(("path", "field", "cell"), FIELDS)
def test_field_is_served_as_its_row_states(path: str, field: str, cell: str) -> None:
    body: dict[str, Any] = {**BODIES[path][1], field: example(path, field)}
    service = POOLS if path in POOLING.split() else GENERATES
    reply = post(app_over(service), path, body | ({"logprobs": True} if field == "top_logprobs" else {}))
    ignored = reply.headers.get("x-tidemill-ignored", "").split(", ")
    match cell:
        case "works":
            assert (reply.status_code, field in ignored) == (200, False), reply.text
        case "ignored":
            assert (reply.status_code, field in ignored) == (200, True), reply.text
        case "refused":
            assert (reply.status_code, field in reply.text) == (400, True), reply.text
        case _:
            assert cell == "with a database"
            assert field in ignored or (reply.status_code == 400 and field in reply.text), reply.text
