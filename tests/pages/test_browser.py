"""The checks find each kind of fault in a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages.browser import PHONE, start_browser, visit

pytestmark = pytest.mark.pages

_GOOD = """<!doctype html>
<html lang="en"><head><title>A page</title>{}</head><body><main><h1>A page</h1>{}</main></body></html>"""
_FAULTS = {
    "error in the console: undefined_function": ("<script>undefined_function()</script>", ""),
    "error in the console: told": ("<script>console.error('told')</script>", ""),
    "asks another host: http://nowhere.invalid/": ('<link rel="stylesheet" href="http://nowhere.invalid/">', ""),
    "image-alt": ("", '<img src="data:,">'),
    "color-contrast": ("", '<p style="color: #ccc; background: #fff">Pale words</p>'),
    " pixels too wide": ("", '<div style="width: 992px">wide</div>'),
}


def test_each_kind_of_fault_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with start_browser() as browser:
        path.write_text(_GOOD.format("", "<p>Nothing is wrong.</p>"))
        with visit(browser, path.as_uri(), PHONE) as good:
            assert good.problems() == []
        for fault, parts in _FAULTS.items():
            path.write_text(_GOOD.format(*parts))
            with visit(browser, path.as_uri(), PHONE) as bad:
                assert any(fault in problem for problem in bad.problems()), (fault, bad.problems())
