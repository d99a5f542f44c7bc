"""The pages of ``raglane inspect --html`` and of a run in a browser, and the checks on a page with
faults.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

import raglane as rl
from made_plans import make_plan
from pages.browser import PHONE, WAYS, WIDE, visit
from raglane.cli import main
from raglane.data.store.conversion import Progress
from raglane.runs.inspection.inspect import inspect
from raglane.runs.inspection.page import as_page
from raglane.runs.inspection.reading import ChannelFacts, Contents, labels_of
from raglane.runs.sources import SequenceSource
from raglane.training.settings import Settings

pytestmark = pytest.mark.pages

ODD = '</script><b>&"' + "long" * 30


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of data of several kinds, by names."""
    folder = tmp_path_factory.mktemp("pages")
    random = np.random.default_rng(3)
    features = tuple(ChannelFacts(name, number) for number, name in enumerate(("a", "b", ODD)))
    labels = labels_of("sequence", {"x": 300, "y": 5, ODD: 1})
    many = Contents(
        ODD, None, random.integers(1, 40, 2000), "features", features, labels=labels, notes=(ODD,)
    )
    kinds = {
        "features": many,
        "a-tail": replace(
            many, kind="tokens", lengths=np.append(many.lengths, [0, 9000]), vocabulary=7
        ),
        "one": Contents("one.txt", None, np.array([7]), "lengths"),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raglane.runs.inspection.inspect.plan", make_plan)
        for name, contents in kinds.items():
            details = {
                "source": SequenceSource(None, None),
                "ranks": 4,
                "fresh": False,
                "progress": Progress(),
            }
            path = folder / f"{name}.html"
            path.write_bytes(as_page(inspect(contents, Settings(hidden_size=8), **details)))  # type: ignore[arg-type]
            found[name] = path
    return found


def test_nothing_is_wrong_with_the_pages(browser: Browser, pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        # The others differ only in their numbers.
        for width, scheme in WAYS if name == "features" else WAYS[1:3]:
            with visit(browser, path.as_uri(), width, scheme) as here:
                here.page.wait_for_selector("#ranks-drawn svg")
                assert here.problems() == [], (name, width, scheme)


def test_every_chart_draws_in_the_colours_of_the_page(
    browser: Browser, pages: dict[str, Path]
) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        with visit(browser, pages["features"].as_uri(), WIDE, scheme) as here:
            here.page.wait_for_selector("#ranks-drawn svg")
            for name in ("lengths-drawn", "densities-drawn", "steps-drawn", "ranks-drawn"):
                place = here.page.locator(f"#{name}")
                assert place.locator("svg path, svg rect").count() > 8, name
                box: Any = place.locator("svg").bounding_box()
                assert box["width"] > 450
                assert place.get_attribute("aria-label")
            assert "e+" not in (here.page.locator("#steps-drawn").text_content() or "")
            text = "getComputedStyle(document.querySelector('#densities-drawn svg text')).fill"
            colors[scheme] = here.page.evaluate(text)
            bar = "getComputedStyle(document.querySelector('#lengths-drawn .mark-rect path')).fill"
            assert here.page.evaluate(bar).startswith("rgb(")
            bars = here.page.locator("#lengths-drawn .mark-rect path").count()
            assert bars == here.page.locator("#lengths figure table tbody tr").count() > 10
    assert colors == {"light": "rgb(51, 51, 51)", "dark": "rgb(224, 224, 224)"}


def test_a_reader_picks_a_picture_with_the_mouse_or_the_keyboard(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with visit(browser, pages["features"].as_uri()) as here:
        shown = here.page.locator(".picture:visible")

        def name() -> str | None:
            assert shown.count() == 1
            assert shown.locator("svg").bounding_box()
            return shown.get_attribute("data-name")

        assert name() == "worst-padded"
        here.page.get_by_text("best (").first.click()
        assert name() == "best-padded"
        here.page.get_by_role("radio", name="lanes").check()
        assert name() == "best-lanes"
        here.page.keyboard.press("ArrowLeft")
        assert name() == "best-packed"
        here.page.keyboard.press("Shift+Tab")
        here.page.keyboard.press("ArrowLeft")
        assert name() == "median-packed"
        words: Any = shown.locator("[role=img]").get_attribute("aria-label")
        assert words.startswith("The median batch, packed:")
        focused = "getComputedStyle(document.activeElement.closest('label')).outlineStyle"
        assert here.page.evaluate(focused) == "solid"


def test_the_keyboard_goes_to_the_content_and_a_button_copies(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with visit(browser, pages["features"].as_uri()) as here:
        here.page.keyboard.press("Tab")
        assert here.page.evaluate("document.activeElement.textContent") == "To the content"
        here.page.keyboard.press("Enter")
        assert here.page.evaluate("location.hash") == "#main"
        for landmark in ("banner", "main", "contentinfo", "navigation"):
            assert here.page.get_by_role(landmark).count() == 1, landmark
        assert here.page.get_by_role("heading", level=2).count() == 8
        here.page.get_by_role("button", name="Copy").click()
        here.page.wait_for_function("document.querySelector('.copied').textContent")
        assert here.page.locator(".copied").text_content() in ("copied", "selected")
        assert here.errors == []


def test_paper_is_white_and_has_all_the_numbers(browser: Browser, pages: dict[str, Path]) -> None:
    with visit(browser, pages["features"].as_uri(), WIDE, "dark") as here:
        here.page.wait_for_selector("#ranks-drawn svg")
        here.page.emulate_media(media="print", color_scheme="dark")
        here.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert here.page.locator("details:not([open])").count() == 0
        assert here.page.evaluate("getComputedStyle(document.body).color") == "rgb(51, 51, 51)"
        assert (
            here.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        # The width of A4.
        here.page.set_viewport_size({"width": 690, "height": 1000})
        assert here.too_wide() <= 0
        here.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert here.page.locator("details[open]").count() == 0
        assert len(here.page.pdf(format="A4")) > 20_000


def test_nothing_is_wrong_with_the_page_of_a_run(browser: Browser, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    data = [random.normal(size=(length, 2)).tolist() for length in random.integers(1, 40, 60)]
    labels = [("a", "b", ODD)[place % 3] for place in range(60)]
    sizes = [float(len(one)) for one in data]
    shared: dict[str, Any] = {"epochs": 3, "hidden_size": 4, "threads": 1, "progress": False}
    rl.fit(data, labels, output=tmp_path / "classes", **shared)
    rl.fit(data, labels, output=tmp_path / "wider", **shared | {"hidden_size": 8})
    rl.fit(data, sizes, output=tmp_path / "numbers", **shared)
    for name in ("classes", "numbers"):
        for width, scheme in WAYS if name == "classes" else WAYS[1:3]:
            with visit(browser, (tmp_path / name / "report.html").as_uri(), width, scheme) as here:
                assert here.problems() == [], (name, width, scheme)
                pictures = here.page.locator("figure.picture svg")
                assert pictures.count() == (5 if name == "classes" else 6)
                for place in range(pictures.count()):
                    box: Any = pictures.nth(place).bounding_box()
                    assert box["height"] > 100
                ink = here.page.evaluate(
                    "getComputedStyle(document.querySelector('figure.picture svg')).color"
                )
                assert ink == {"light": "rgb(51, 51, 51)", "dark": "rgb(224, 224, 224)"}[scheme]
    page = tmp_path / "runs.html"
    assert (
        main(
            [
                "compare",
                *[str(tmp_path / name) for name in ("classes", "wider", "numbers")],
                "-o",
                str(page),
            ]
        )
        == 0
    )
    for width, scheme in WAYS[1:3]:
        with visit(browser, page.as_uri(), width, scheme) as here:
            assert here.problems() == [], (width, scheme)
            assert here.page.locator("tr.best").count() == 2
    with visit(browser, (tmp_path / "classes" / "report.html").as_uri()) as here:
        here.page.get_by_role("button", name="Copy").first.click()
        here.page.wait_for_function("document.querySelector('.copied').textContent")
        command = here.page.locator(".command code").first.text_content() or ""
        assert command.splitlines()[0].startswith("raglane predict ")
        here.page.emulate_media(media="print")
        here.page.set_viewport_size({"width": 690, "height": 1000})
        assert here.too_wide() <= 0
        assert len(here.page.pdf(format="A4")) > 20_000


def test_nothing_is_wrong_with_pages_of_a_forecast_and_of_a_search(
    browser: Browser, tmp_path: Path
) -> None:
    wave = np.sin(np.arange(200) * np.pi / 12)[:, None]
    rl.fit([wave], task="forecast", output=tmp_path / "run", epochs=2, threads=1, progress=False)
    table = tmp_path / "rows.csv"
    rows = [f"{row // 5},{row % 7},{'ab'[row // 5 % 2]}" for row in range(150)]
    table.write_text("\n".join(["id,value,label", *rows]))
    words = ["--trials", "2", "--epochs", "2", "--threads", "1", "--quiet"]
    assert main(["tune", str(table), "--output", str(tmp_path / "search"), *words]) == 0
    for folder, pictures in (("run", 4), ("search", 4)):
        for width, scheme in WAYS[1:3]:
            with visit(browser, (tmp_path / folder / "report.html").as_uri(), width, scheme) as at:
                assert at.problems() == [], (folder, width, scheme)
                assert at.page.locator("figure.picture svg").count() == pictures


_GOOD = """<!doctype html>
<html lang="en"><head><title>A page</title>{}</head><body><main><h1>A page</h1>{}</main></body></html>"""
_FAULTS = {
    "error in the console: undefined_function": ("<script>undefined_function()</script>", ""),
    "error in the console: told": ("<script>console.error('told')</script>", ""),
    "asks another host: http://nowhere.invalid/": (
        '<link rel="stylesheet" href="http://nowhere.invalid/">',
        "",
    ),
    "image-alt": ("", '<img src="data:,">'),
    "color-contrast": ("", '<p style="color: #ccc; background: #fff">Pale words</p>'),
    " pixels too wide": ("", '<div style="width: 992px">wide</div>'),
}


def test_each_kind_of_fault_is_seen(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(_GOOD.format("", "<p>Nothing is wrong.</p>"))
    with visit(browser, path.as_uri(), PHONE) as good:
        assert good.problems() == []
    for fault, parts in _FAULTS.items():
        path.write_text(_GOOD.format(*parts))
        with visit(browser, path.as_uri(), PHONE) as bad:
            assert any(fault in problem for problem in bad.problems()), (fault, bad.problems())
