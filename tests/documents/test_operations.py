"""The page of operations has the tables that its script makes, whose calls must give what they give
for flat values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import load


def test_the_page_is_up_to_date() -> None:
    script = load(Path(__file__).parents[2] / "docs" / "operations.py")
    text, written = script.page(), script.PAGE.read_text(encoding="utf-8")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the page is for nested tensors of PyTorch 2.13")
    assert text == written
