"""A browser of BROWSER, the path of a Chromium that `make browser` finds; without it nothing is collected."""

import os
from collections.abc import Generator

import pytest

if "BROWSER" not in os.environ:
    collect_ignore_glob = ["test_*.py", "pages.py"]
else:
    from playwright.sync_api import Browser, expect, sync_playwright

    from tests.support.browser.pages import Pages

    EVENTUALLY_MS_MAX = 60_000  # far beyond any machine's slowness
    expect.set_options(timeout=EVENTUALLY_MS_MAX)

    @pytest.fixture(scope="session")
    def browser() -> Generator[Browser]:
        with sync_playwright() as playwright:
            # the sandbox does not start for root, and the pages are our own
            browser = playwright.chromium.launch(
                executable_path=os.environ["BROWSER"], args=["--no-sandbox", "--disable-gpu"]
            )
            try:
                yield browser
            finally:
                browser.close()

    @pytest.fixture
    def pages(browser: Browser) -> Generator[Pages]:
        """Opens pages; at the end none of them may have broken or have been refused something."""
        pages = Pages(browser, EVENTUALLY_MS_MAX)
        yield pages
        pages.close()
        assert not pages.complaints
