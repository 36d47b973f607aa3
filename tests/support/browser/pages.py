"""Pages under test and what they complain of, over an application behind a real socket."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page

from tests.support.cluster.fake_service import serving

WIDE = (1280, 900)
PHONE = (360, 780)


class Pages:
    def __init__(self, browser: Browser, patience_ms: int) -> None:
        self._browser = browser
        self._patience_ms = patience_ms
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []

    def open(
        self, url: str, size: tuple[int, int] = WIDE, scheme: Literal["light", "dark"] = "light"
    ) -> Page:
        """A tab with an empty memory, `size` in CSS pixels."""
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        context.set_default_timeout(self._patience_ms)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", self._broke)
        page.on("console", self._logged)
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.goto(url)
        return page

    @contextmanager
    def over(self, app: FastAPI) -> Generator[str]:
        """The URL of `app`, served by a thread until the end of the block; the pages end before."""
        url: list[str] = []
        loops: list[asyncio.AbstractEventLoop] = []
        up = threading.Event()
        stop = asyncio.Event()

        async def main() -> None:
            async with serving(app) as served:
                url.append(served)
                loops.append(asyncio.get_running_loop())
                up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        try:
            up.wait()
            yield url[0]
        finally:
            self.close()  # an open stream would keep the server
            loops[0].call_soon_threadsafe(stop.set)
            thread.join()

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()

    def _broke(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _logged(self, message: ConsoleMessage) -> None:
        """Record a message. Refusals of a server are part of some tests, those of the policy of none."""
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)
