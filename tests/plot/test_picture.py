"""Files, themes and errors of pictures, and the global state of matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image, rcParams
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import raglane as rl
from drawings import SIX
from raglane import plot
from raglane._utils.drawing import DARK, LIGHT
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from scripts import Script


def test_saved_as_svg_and_png_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.PNG"):
        plot.packed(SIX).save(tmp_path / name)
    plot.packed(SIX).save(str(tmp_path / "c.svg"))
    svg = (tmp_path / "a.svg").read_bytes()
    assert svg == (tmp_path / "b.svg").read_bytes() == (tmp_path / "c.svg").read_bytes()
    assert b"<text" not in svg
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()
    assert image.imread(tmp_path / "a.png").shape[2] == 4


def test_a_notebook_shows_a_picture_but_not_one_in_the_callers_axes() -> None:
    assert "<svg" in str(plot.packed(SIX)._repr_svg_())
    assert plot.packed(SIX, axes=Figure().add_subplot())._repr_svg_() is None


def test_a_theme_holds_for_its_block() -> None:
    pictures = [plot.histogram([1, 2])]
    with plot.theme("dark"):
        pictures.append(plot.histogram([1, 2]))
        with plot.theme("light"):
            pictures.append(plot.histogram([1, 2]))
    pictures.append(plot.histogram([1, 2]))
    for picture, look in zip(pictures, (LIGHT, DARK, LIGHT, LIGHT), strict=True):
        assert picture.figure.get_facecolor() == to_rgba(look.paper)
        assert picture.axes[0].get_facecolor() == to_rgba(look.paper)
        assert picture.axes[0].xaxis.label.get_color() == look.ink
    with pytest.raises(RuntimeError), plot.theme("dark"):
        raise RuntimeError
    figure: Any = plot.histogram([1]).figure
    assert figure.get_facecolor() == to_rgba(LIGHT.paper)
    figure.canvas.draw()
    assert len(figure.canvas.buffer_rgba())


def test_drawn_into_axes_of_the_caller() -> None:
    figure = Figure(figsize=(9, 9))
    panels = figure.subplots(3, 2)
    picture = plot.schedules(SIX, axes=panels.flat[:5])
    assert picture.figure is figure
    assert picture.axes == tuple(panels.flat[:5])
    assert plot.waste(SIX, axes=panels[2, 1]).axes == (panels[2, 1],)
    assert len(panels[0, 1].patches) > 0
    plot.padded([1, 1], axes=panels[0, 0])
    plot.gates(rl.Ragged([[0.5]]), axes=panels[0, 1])
    assert panels[0, 0].get_xlim() == panels[0, 1].get_xlim() == (0, 1)
    figure.canvas.draw()


def test_no_global_state_of_matplotlib() -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    # Reading the backend would choose one.
    before = {name: rcParams[name] for name in rcParams if name != "backend"}
    plot.schedules(SIX)._repr_svg_()
    plot.histogram(SIX)._repr_svg_()
    plot.norms(rl.Ragged([[1.0, 2.0]]))._repr_svg_()
    assert {name: rcParams[name] for name in before} == before
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_every_error_says_what_to_install(script: Script) -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import raglane as rl
rl.plot.padded
assert "raglane.nn" not in sys.modules
half = rl.Ragged([[0.5]])
calls = [lambda draw=draw: draw([3, 2]) for draw in (rl.plot.padded, rl.plot.packed, rl.plot.lanes, rl.plot.schedules)]
calls += [lambda draw=draw: draw([3, 2]) for draw in (rl.plot.histogram, rl.plot.waste)]
calls += [lambda draw=draw: draw(half) for draw in (rl.plot.attention, rl.plot.gates, rl.plot.norms)]
for call in calls:
    try:
        call()
    except rl.errors.MissingExtraError as error:
        print(error)
"""
    done, line = script(code), "matplotlib is not installed. Run pip install 'raglane[plot]'.\n"
    assert (done.returncode, done.stdout) == (0, line * 9), done.stderr


def test_wrong_names(tmp_path: Path) -> None:
    with (
        pytest.raises(ArgumentError, match=r"name must be one of light, dark.*, got 'blue'"),
        plot.theme("blue"),
    ):
        pass
    for name in ("a.pdf", "a", ".svg"):
        with pytest.raises(
            ArgumentError, match=r"path must be a name that ends in \.svg, \.png, got .*"
        ):
            plot.packed(SIX).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


_HALVES = rl.Ragged.from_flat(torch.full((3,), 0.5), lengths=[2, 1])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: plot.padded([3, 2], labels=["abc"]),
            ShapeError,
            r"labels must be .* one label for each.*, got 1 lists",
        ),
        (
            lambda: plot.packed([3, 2], labels=["abc", "d"]),
            ShapeError,
            "labels must be .*here 2, got 1 for",
        ),
        (
            lambda: plot.padded([2**20] * 9),
            ArgumentError,
            "lengths must be .*at most 8,388,608.*, got 9,437,184",
        ),
        (
            lambda: plot.schedules([1], axes=Figure().add_subplot()),
            ShapeError,
            r"axes must be 5.*, got 1 axes",
        ),
        (lambda: plot.lanes([1], threads=0), ArgumentError, r"threads must be at least 1.*, got 0"),
        (lambda: plot.histogram([1], 0), ArgumentError, r"batch_size must be at least 1.*, got 0"),
        (lambda: plot.waste([1], []), ArgumentError, r"batch_sizes must be .*got none"),
        (lambda: plot.attention(torch.ones(3)), ArgumentTypeError, "weights must be "),  # type: ignore[arg-type]
        (
            lambda: plot.attention(_HALVES * 3),
            ArgumentError,
            r"weights must be numbers from 0 to 1.*, got 1.5",
        ),
        (
            lambda: plot.attention(_HALVES.to(torch.int64)),
            ArgumentTypeError,
            "weights must be .*got torch.int64",
        ),
        (
            lambda: plot.norms(rl.Ragged([torch.ones(3, 2, 2)])),
            ShapeError,
            r"states must be .*got .* shape \(2, 2\)",
        ),
        (
            lambda: plot.gates({}),
            ArgumentError,
            r"activity must be at least one Ragged.*, got none",
        ),
        (lambda: plot.gates({"f": 3}), ArgumentTypeError, r"activity\['f'\] must be .*got 3"),  # type: ignore[dict-item]
        (
            lambda: plot.gates({"i": _HALVES, "f": _HALVES[:1]}),
            ShapeError,
            "gate f must be .* 2 sequences.*, got 1",
        ),
        (
            lambda: plot.norms({"h": _HALVES}, axes=Figure().subplots(2)),
            ShapeError,
            r"axes must be 1.*, got 2 axes",
        ),
    ],
)
def test_errors_teach(call: Callable[[], Any], kind: type[RaglaneError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert " must be " in str(caught.value)


@pytest.mark.parametrize(
    "draw", [plot.padded, plot.packed, plot.lanes, plot.schedules, plot.histogram, plot.waste]
)
def test_lengths_are_read_as_cost_reads_them(draw: Callable[[Any], Any]) -> None:
    for wrong in ([3, -1], [3.0], [[1, 2]], 5, "3", None, [torch.zeros(3)]):
        with pytest.raises(RaglaneError) as expected:
            rl.cost(wrong)
        with pytest.raises(type(expected.value)) as caught:
            draw(wrong)
        assert str(caught.value) == str(expected.value)
