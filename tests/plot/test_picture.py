"""A picture shows and saves itself, in a theme, and does not change the state of matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image, rcParams
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import raglane as rl
from drawings import SIX
from raglane import plot
from raglane._utils.drawing import DARK, LIGHT
from raglane.errors import ArgumentError


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
    shown = plot.packed(SIX)._repr_svg_()
    assert shown is not None
    assert "<svg" in shown
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
    assert plot.histogram([1]).figure.get_facecolor() == to_rgba(LIGHT.paper)


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
    # To ask for the backend is to choose one.
    before = {name: rcParams[name] for name in rcParams if name != "backend"}
    plot.schedules(SIX)._repr_svg_()
    plot.histogram(SIX)._repr_svg_()
    plot.norms(rl.Ragged([[1.0, 2.0]]))._repr_svg_()
    assert {name: rcParams[name] for name in before} == before
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_every_error_says_what_to_install() -> None:
    """In a process of its own, which has loaded none of its modules before."""
    code = """
import sys
sys.modules["matplotlib"] = None
import raglane as rl
half = rl.Ragged([[0.5]])
rows, kernels = [{"method": "a", "fill": 1, "seconds": 1}], [{"name": "a", "intensity": 1, "rate": 1}]
calls = [lambda draw=draw: draw([3, 2]) for draw in (rl.plot.padded, rl.plot.packed, rl.plot.lanes, rl.plot.schedules)]
calls += [lambda draw=draw: draw([3, 2]) for draw in (rl.plot.histogram, rl.plot.waste)]
calls += [lambda draw=draw: draw(half) for draw in (rl.plot.attention, rl.plot.gates, rl.plot.norms)]
calls += [lambda: rl.plot.times(rows), lambda: rl.plot.roofline(kernels, peak=1, bandwidth=1)]
for call in calls:
    try:
        call()
    except rl.errors.MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["matplotlib is not installed. Run pip install 'raglane[plot]'."] * 11


def test_the_package_loads_without_matplotlib() -> None:
    unwanted = "[name for name in ('matplotlib', 'raglane.nn') if name in sys.modules]"
    code = f"import sys, raglane as rl; rl.plot.padded; print({unwanted})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name must be one of light, dark.*, got 'blue'"), plot.theme("blue"):
        pass
    for name in ("a.pdf", "a", ".svg"):
        with pytest.raises(ArgumentError, match=r"path must be a name that ends in \.svg or \.png.*, got .*"):
            plot.packed(SIX).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
