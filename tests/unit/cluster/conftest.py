"""gRPC stays up for the tests of this folder and those that follow them."""

import asyncio
from collections.abc import Generator

import grpc.aio
import pytest


@pytest.fixture(scope="session", autouse=True)
def grpc_stays() -> Generator[None]:
    """It shuts itself down when its last object is collected, in whatever test that happens, and may wait
    there for ever for a call that was cancelled. It wants a loop, which stays open as long."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  - not in its stubs
    asyncio.set_event_loop(None)
    yield
    loop.close()
