"""Requests to any path of /openapi.json cause no 5xx and no hang, and the answers match the document."""

import asyncio
import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import Receive, Scope, Send

from tests.support.cluster.fake_service import FakeService, app_over, saying

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
IS_DEEP = "FUZZ_EXAMPLES" in os.environ
ANSWERED_S_MAX = 60
"""Far beyond any machine's slowness: what takes longer hangs."""

EDGE = app_over(FakeService(saying(" Emma is in the tower.")))


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The edge, with an end to everything."""
    async with asyncio.timeout(ANSWERED_S_MAX):
        await EDGE(scope, receive, send)


schema = schemathesis.openapi.from_asgi("/openapi.json", app)
schema.config.generation.update(modes=list(schemathesis.GenerationMode))
schema.config.phases.coverage.enabled = IS_DEEP  # each boundary of each field


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_fuzz(case: schemathesis.Case[Any]) -> None:
    """Send data that match the document, and others."""
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    case.call_and_validate(checks=checks)
