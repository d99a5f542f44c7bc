"""The pages of the site that ``make docs`` builds: nothing serious for axe, no error, nothing from other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from pages.browser import PHONE, WIDE, Scheme, serve, start_browser, visit

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
PAGES = sorted(str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert (SITE / "index.html").is_file(), "the site is not built; run: make docs"
    with serve(SITE) as address:
        yield address


@pytest.mark.parametrize("name", [*PAGES, "genindex.html", "search.html"])
def test_page(browser: Browser, address: str, name: str) -> None:
    # Pages of the reference are long and all alike: once is enough, where there is least room.
    ways: list[tuple[int, Scheme]] = (
        [(PHONE, "light")] if name.startswith("api/") else [(WIDE, "light"), (PHONE, "dark")]
    )
    for width, scheme in ways:
        with visit(browser, f"{address}/{name}", width, scheme) as page:
            assert page.problems() == [], (name, width, scheme)


def test_the_search_finds_a_page(browser: Browser, address: str) -> None:
    with visit(browser, f"{address}/search.html?q=forget_bias_") as found:
        found.page.get_by_role("link", name="raglane.nn.init.forget_bias_").first.wait_for(timeout=10_000)
        assert found.problems() == []
