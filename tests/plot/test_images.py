"""The pictures are compared with reviewed images."""

from __future__ import annotations

import pytest

from drawings import IMAGES, PICTURES, WRONG, difference

# Of the root of the mean squared difference of pixels, which are from 0 to 1. One that is wrong in one thing, as those
# in WRONG, has at least 0.0108.
_TOLERANCE = 0.008


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_its_image(name: str) -> None:
    assert difference(PICTURES[name]().figure, IMAGES / f"{name}.png") < _TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_picture_does_not(name: str) -> None:
    assert difference(WRONG[name]().figure, IMAGES / f"{name}.png") > _TOLERANCE


def test_each_image_is_of_a_picture() -> None:
    assert {path.stem for path in IMAGES.iterdir()} == set(PICTURES) == set(WRONG)
