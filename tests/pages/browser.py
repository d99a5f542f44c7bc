"""A browser for the tests of pages: what a page logs, asks of other hosts and shows too wide, and what axe finds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WIDE, PHONE = 1280, 390
"""Widths of a window in pixels: of a computer and of a phone."""

Scheme = Literal["light", "dark"]
"""The colours that a reader prefers."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SERIOUS = ("serious", "critical")
_HERE = ("", "localhost", "127.0.0.1")


@contextmanager
def start_browser() -> Iterator[Browser]:
    """The machine's Chromium, without a window; it must be installed."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    assert path is not None, f"no browser among {', '.join(_NAMES)}: install one, on Debian with apt install chromium"
    with sync_playwright() as playwright:
        # The sandbox needs rights that a container does not give; background networking would look like the page's.
        options = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The files of a folder over HTTP on this machine; gives the address that the folder has."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclass
class Visit:
    """A page that is open, and what happened since."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """What the console was told as an error, and exceptions that nobody caught."""
    outside: list[str] = field(default_factory=list)
    """Addresses on other hosts that the page asked for."""

    def serious_findings(self) -> list[str]:
        """What axe finds of serious impact or worse, a line each: the rule, and the first element that breaks it."""
        found: dict[str, Any] = Axe().run(self.page, options={"resultTypes": ["violations"]}).response
        return [
            f"{finding['id']}: {finding['help']}, {len(finding['nodes'])} times, such as {finding['nodes'][0]['html']}"
            for finding in found["violations"]
            if finding["impact"] in _SERIOUS
        ]

    def too_wide(self) -> int:
        """By how many pixels the page or its text is wider than its room, so that a reader has to scroll sideways."""
        parts = "document.querySelectorAll('html, body, main, .content')"
        return int(self.page.evaluate(f"Math.max(...[...{parts}].map(part => part.scrollWidth - part.clientWidth))"))

    def problems(self) -> list[str]:
        """Everything that a good page has none of."""
        return [
            *(f"error in the console: {error}" for error in self.errors),
            *(f"asks another host: {address}" for address in self.outside),
            *self.serious_findings(),
            *([f"{self.too_wide()} pixels too wide"] if self.too_wide() > 0 else []),
        ]


@contextmanager
def visit(browser: Browser, address: str, width: int = WIDE, scheme: Scheme = "light") -> Iterator[Visit]:
    """Open a page.

    Args:
        browser: of :func:`start_browser`.
        address: of the page: ``path.as_uri()``, or below that of :func:`serve`.
        width: of the window in pixels.
        scheme: the colours that the reader prefers.

    Returns:
        The page when all that it asks for has come.
    """
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    here = Visit(page)
    page.on("console", lambda entry: here.errors.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: here.errors.append(str(error)))
    page.on("request", lambda request: here.outside.append(request.url) if _is_outside(request.url) else None)
    page.goto(address, wait_until="networkidle")
    yield here
    page.close()


def _is_outside(address: str) -> bool:
    return (urlsplit(address).hostname or "") not in _HERE
