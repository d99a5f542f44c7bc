"""The pages of the site that ``make docs`` builds: nothing serious for axe, no error, nothing from
other hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from pages.browser import PHONE, WIDE, Scheme, serve, visit

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
_PATHS = [
    path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")
]
# Pages that are alike, which others of their folder need not repeat: axe takes minutes for the long
# tables of results.
_OF_MANY = {
    "results": ("README", "small-calls"),
    "names": ("raglane.Ragged", "raglane.nn.LSTM", "raglane.transduction.beam_search"),
}
PAGES = sorted(
    str(path)
    for path in _PATHS
    if path.parent.name not in _OF_MANY or path.stem in _OF_MANY[path.parent.name]
)

_TAG = re.compile("<[^>]+>")
_SIGNATURE = re.compile('<dt class="sig .*?</dt>', re.DOTALL)
_SECOND_SIGNATURE = re.compile(r'</dt>\s*<dt class="sig ')


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


@pytest.mark.parametrize(("name", "count"), [("index", 2), ("methods", 4)])
def test_pictures_shrink_to_a_phone_and_keep_their_labels_readable(
    browser: Browser, address: str, name: str, count: int
) -> None:
    excess = "part => part.scrollWidth - part.clientWidth"
    with visit(browser, f"{address}/{name}.html", PHONE) as here:
        pictures = here.page.locator(".picture").all()
        assert len(pictures) == count
        for picture in pictures:
            assert picture.evaluate(excess) == 0
            box: Any = picture.locator("img").first.bounding_box()
            drawn = picture.evaluate("part => getComputedStyle(part).getPropertyValue('--wide')")
            # Of the smallest text, 8 points of 4/3 pixels.
            assert 8 * box["width"] / float(drawn.removesuffix("pt")) > 6


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("LSTM", "raglane.nn.LSTM"),
        ("rl.nn.LSTM", "raglane.nn.LSTM"),
        ("rl.Ragged", "raglane.Ragged"),
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
        ("pack_padded_sequence", "api/names/raglane.packing.pack_padded_sequence"),
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


def test_names_have_one_signature_without_any_number_of_arguments() -> None:
    pages = sorted((SITE / "api").rglob("*.html"))
    entries = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        signatures = _SIGNATURE.findall(text)
        entries += len(signatures)
        assert [each for each in signatures if "*args" in _TAG.sub("", each)] == [], page.name
        assert _SECOND_SIGNATURE.search(text) is None, page.name
    assert entries > 500


def test_an_entry_of_the_reference_has_a_page_of_its_own(browser: Browser, address: str) -> None:
    with visit(browser, f"{address}/api/layers.html") as layers:
        assert layers.page.locator("dt.sig").count() == 0
        layers.page.get_by_role("link", name="rl.nn.LSTM", exact=True).first.click()
        layers.page.wait_for_load_state()
        assert layers.page.locator("dt.sig").first.get_attribute("id") == "raglane.nn.LSTM"
        assert layers.problems() == []
