"""The pages of the site that ``make docs`` builds: nothing serious for axe, no error, nothing from
other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from pages.browser import PHONE, WIDE, Scheme, serve, visit

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
_PATHS = [
    path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")
]
# Two pages of results, which are alike: axe takes minutes for the long tables of the others.
PAGES = sorted(
    str(path)
    for path in _PATHS
    if "results" not in path.parts or path.stem in ("README", "small-calls")
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert (SITE / "index.html").is_file(), "the site is not built; run: make docs"
    with serve(SITE) as address:
        yield address


@pytest.mark.parametrize("name", [*PAGES, "genindex.html", "search.html"])
def test_page(browser: Browser, address: str, name: str) -> None:
    # Pages of the reference are long and all alike: once is enough, where there is least room.
    ways: list[tuple[int, Scheme]] = (
        [(PHONE, "light")] if "api/" in name else [(WIDE, "light"), (PHONE, "dark")]
    )
    for width, scheme in ways:
        with visit(browser, f"{address}/{name}", width, scheme) as page:
            assert page.problems() == [], (name, width, scheme)


def test_a_picture_shrinks_to_a_phone_unless_its_labels_were_too_small(
    browser: Browser, address: str
) -> None:
    excess = "part => part.scrollWidth - part.clientWidth"
    with visit(browser, f"{address}/index.html", PHONE) as here:
        schedules, speed = here.page.locator(".picture").all()
        assert speed.evaluate(excess) == 0
        assert speed.locator("img").first.bounding_box()
        assert schedules.evaluate(excess) > 0


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("LSTM", "raglane.nn.LSTM"),
        ("rl.nn.LSTM", "raglane.nn.LSTM"),
        ("forget_bias_", "raglane.nn.init.forget_bias_"),
    ],
)
def test_the_search_finds_a_name_first(
    browser: Browser, address: str, query: str, name: str
) -> None:
    with visit(browser, f"{address}/search.html?q={query}") as found:
        first = found.page.locator("#search-results li a").first
        first.wait_for(timeout=10_000)
        assert first.text_content() == name
        assert found.problems() == []


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("last state", "recipes"),
        ("loss without a mask", "recipes"),
        ("DataLoader", "recipes"),
        ("DDP", "recipes"),
        ("pack_padded_sequence", "api/packing"),
        ("own cell", "add-a-cell"),
        ("export ONNX", "deploy"),
        ("int8", "deploy"),
        ("save model", "deploy"),
        ("early stopping", "training"),
        ("class weights", "training"),
        ("forecast", "tasks"),
        ("text classification", "tasks"),
        ("missing values", "data-formats"),
        ("CSV", "data-formats"),
        ("Keras", "weights"),
        ("Lightning", "works-with"),
        ("streaming", "streams"),
        ("GPU", "on-a-gpu"),
        ("install without a compiler", "install"),
    ],
)
def test_the_search_answers_a_question_in_its_first_results(
    browser: Browser, address: str, query: str, name: str
) -> None:
    with visit(browser, f"{address}/search.html?q={query}") as found:
        links = found.page.locator("#search-results li > a")
        found.page.get_by_text("Search finished").wait_for(timeout=10_000)
        pages = [link.get_attribute("href") for link in links.all()[:3]]
        assert f"{name}.html" in {str(page).partition("#")[0] for page in pages}


def test_a_button_copies_code_without_prompts_and_results(browser: Browser, address: str) -> None:
    with visit(browser, f"{address}/start.html") as start:
        start.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        block = start.page.locator(".highlight", has_text="batch.lengths.tolist()")
        block.hover()
        block.get_by_role("button", name="Copy").click()
        block.get_by_role("button", name="Copied").wait_for()
        lines = str(start.page.evaluate("navigator.clipboard.readText()")).splitlines()
        assert lines[0] == "import torch"
        assert lines[-1] == "batch.lengths.tolist(), batch.values.shape"


def test_names_have_one_signature_without_any_number_of_arguments(
    browser: Browser, address: str
) -> None:
    for name in (page for page in PAGES if page.startswith("api/")):
        with visit(browser, f"{address}/{name}") as reference:
            signatures = reference.page.locator("dt.sig")
            assert [text for text in signatures.all_text_contents() if "*args" in text] == []
            assert reference.page.locator("dt.sig + dt.sig").count() == 0, name
