"""Pages in a browser, with checks: errors, requests to other hosts, width, and accessibility
(axe).
"""

from __future__ import annotations

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
from playwright.sync_api import Browser, Page

WIDE, PHONE = 1280, 390
"""Widths of the windows of a computer and of a phone in pixels."""

Scheme = Literal["light", "dark"]
WAYS: tuple[tuple[int, Scheme], ...] = (
    (WIDE, "light"),
    (WIDE, "dark"),
    (PHONE, "light"),
    (PHONE, "dark"),
)
"""All widths in both colour schemes; the two in the middle have both of either."""

_HERE = (None, "", "localhost", "127.0.0.1")


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP on this machine, and yield the address."""

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
    """An open page, with errors and warnings in its console, uncaught exceptions, and its requests
    to other hosts.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def serious_findings(self) -> list[str]:
        """Return the serious findings of axe: the rule, and the first element that breaks it."""
        found: dict[str, Any] = (
            Axe().run(self.page, options={"resultTypes": ["violations"]}).response
        )
        return [
            f"{finding['id']}: {finding['help']}, {len(finding['nodes'])} times, such as {finding['nodes'][0]['html']}"
            for finding in found["violations"]
            if finding["impact"] in ("serious", "critical")
        ]

    def too_wide(self) -> int:
        """Return the pixels by which the page or its text is too wide, so that it scrolls
        sideways.
        """
        parts = "document.querySelectorAll('html, body, main, .content')"
        return int(
            self.page.evaluate(
                f"Math.max(...[...{parts}].map(part => part.scrollWidth - part.clientWidth))"
            )
        )

    def problems(self) -> list[str]:
        """Return all errors, requests to other hosts, findings of axe, and excess width."""
        return [
            *(f"error in the console: {error}" for error in self.errors),
            *(f"asks another host: {address}" for address in self.outside),
            *self.serious_findings(),
            *([f"{self.too_wide()} pixels too wide"] if self.too_wide() > 0 else []),
        ]


@contextmanager
def visit(
    browser: Browser, address: str, width: int = WIDE, scheme: Scheme = "light"
) -> Iterator[Visit]:
    """Open a page in a window of this width in pixels, and wait until it is loaded."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    here = Visit(page)
    outside = here.outside.append
    page.on(
        "console",
        lambda entry: (
            here.errors.append(entry.text) if entry.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: here.errors.append(str(error)))
    page.on(
        "request",
        lambda request: None if urlsplit(request.url).hostname in _HERE else outside(request.url),
    )
    # The network may be idle while a busy machine still parses a long page.
    page.goto(address, wait_until="load")
    page.wait_for_load_state("networkidle")
    yield here
    page.close()
