"""Pictures look like the reviewed images, and their texts are legible: 8 points, no overlaps, none
outside.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import raglane as rl
from drawings import IMAGES, PICTURES, difference, faults_of_texts
from raglane import plot
from raglane.plot.picture import Picture


def _values(lengths: list[int], features: int = 2) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.rand(sum(lengths), features), lengths=lengths)


_OF_LENGTHS: dict[str, Callable[[list[int]], Picture]] = {
    "padded": plot.padded,
    "padded, labelled": lambda lengths: plot.padded(
        lengths, labels=[["gradient$_"] * length for length in lengths]
    ),
    "packed": plot.packed,
    "lanes": lambda lengths: plot.lanes(lengths, threads=3),
    "lanes, 200": lambda lengths: plot.lanes(lengths, 200, threads=8),
    "schedules": plot.schedules,
    "histogram": lambda lengths: plot.histogram(lengths, 8),
    "waste": plot.waste,
    "attention": lambda lengths: plot.attention(_values(lengths)),
    "gates": lambda lengths: plot.gates({"forget": _values(lengths)}),
    "norms": lambda lengths: plot.norms({"h": _values(lengths) * 1e5, "c": _values(lengths)}),
}


@pytest.mark.parametrize("name", _OF_LENGTHS)
def test_of_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, longest in ((0, 0), (1, 9_999), (24, 4), (1_000, 20)):
        lengths = torch.randint(0, longest + 1, (count,)).tolist()
        assert faults_of_texts(_OF_LENGTHS[name](lengths).figure, monkeypatch) == [], (
            count,
            longest,
        )


@pytest.mark.parametrize("most", [999_999, 98_765_432, 10**12])
def test_of_very_long_lengths(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of_texts(plot.histogram([1, most]).figure, monkeypatch) == []


def test_the_check_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = plot.padded([3, 2])
    axes = picture.axes[0]
    axes.text(0.5, 0.5, "over", ha="center", va="center")
    axes.text(-9, 0.5, "outside")
    axes.text(0.5, 1.5, "1", fontsize=7, ha="center", va="center")
    faults = faults_of_texts(picture.figure, monkeypatch)
    assert "'over' overlaps '0'" in faults
    assert "'outside' leaves the figure" in faults
    assert "'1' has 7.0 points" in faults


# The root mean square difference of pixels, which are from 0 to 1. A picture with one mistake has
# at least 0.0108.
_TOLERANCE = 0.008


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_its_image_and_a_wrong_one_does_not(name: str) -> None:
    right, wrong = (difference(draw().figure, IMAGES / f"{name}.png") for draw in PICTURES[name])
    assert right < _TOLERANCE < wrong


def test_each_image_is_of_a_picture() -> None:
    assert {path.stem for path in IMAGES.iterdir()} == set(PICTURES)
