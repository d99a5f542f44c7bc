"""The page of a run in a browser: nothing is wrong with it, wide or narrow, dark or light, whatever the data holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raglane as rl
from pages.browser import PHONE, WIDE, Scheme, start_browser, visit

pytestmark = pytest.mark.pages

_WAYS: tuple[tuple[int, Scheme], ...] = ((WIDE, "light"), (WIDE, "dark"), (PHONE, "light"), (PHONE, "dark"))
_ODD = '</script><b>&"' + "long" * 30


def test_nothing_is_wrong_with_the_page_of_a_run(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    data = [random.normal(size=(length, 2)).tolist() for length in random.integers(1, 40, 60)]
    labels = [("a", "b", _ODD)[place % 3] for place in range(60)]
    sizes = [float(len(one)) for one in data]
    shared: dict[str, Any] = {"epochs": 3, "hidden_size": 4, "threads": 1, "progress": False}
    rl.fit(data, labels, out=tmp_path / "classes", **shared)
    rl.fit(data, sizes, out=tmp_path / "numbers", **shared)
    with start_browser() as browser:
        for name in ("classes", "numbers"):
            for width, scheme in _WAYS if name == "classes" else _WAYS[1:3]:
                with visit(browser, (tmp_path / name / "report.html").as_uri(), width, scheme) as here:
                    assert here.problems() == [], (name, width, scheme)
                    pictures = here.page.locator("figure.picture svg")
                    assert pictures.count() == (3 if name == "classes" else 4)
                    for place in range(pictures.count()):
                        box = pictures.nth(place).bounding_box()
                        assert box is not None
                        assert box["height"] > 100
                    ink = here.page.evaluate("getComputedStyle(document.querySelector('figure.picture svg')).color")
                    assert ink == {"light": "rgb(51, 51, 51)", "dark": "rgb(224, 224, 224)"}[scheme]
        with visit(browser, (tmp_path / "classes" / "report.html").as_uri()) as here:
            here.page.get_by_role("button", name="Copy").first.click()
            here.page.wait_for_function("document.querySelector('.copied').textContent")
            command = here.page.locator(".command code").first.text_content() or ""
            assert command.splitlines()[0].startswith("raglane predict ")
            here.page.emulate_media(media="print")
            here.page.set_viewport_size({"width": 690, "height": 1000})
            assert here.too_wide() <= 0
            assert len(here.page.pdf(format="A4")) > 20_000
