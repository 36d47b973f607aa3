"""gRPC stays up for the tests of this folder and those that follow them."""

import grpc.aio
import pytest


@pytest.fixture(scope="session", autouse=True)
def grpc_stays() -> None:
    """It shuts itself down when its last object is collected, in whatever test that happens, and may wait
    there for ever for a call that was cancelled."""
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  - not in its stubs
