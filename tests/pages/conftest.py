"""The browser of the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the installed Chromium without a window, for the tests of this folder."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    assert path is not None, (
        f"no browser among {', '.join(_NAMES)}: install one, on Debian with apt install chromium"
    )
    with sync_playwright() as playwright:
        # Containers do not permit the sandbox; background requests would be attributed to the page.
        options = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()
