"""A fake service behind a real HTTP socket, for blocking clients."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tests.support.cluster.fake_service import FakeService, app_over, serving

T = TypeVar("T")


def with_server(service: FakeService, call: Callable[[str], T]) -> T:
    """Serve the API of `service`; return the result of `call`, which gets the URL, on a thread."""

    async def main() -> T:
        async with serving(app_over(service)) as url:
            return await asyncio.to_thread(call, url)

    return asyncio.run(main())
