"""Colours and numbers are at their elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgba

import raglane as rl
from raglane import plot
from raglane._utils.drawing import VERMILION

_LENGTHS = [3, 0, 1, 2]


def _texts(axes: Any) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in axes.texts}


def _colors(axes: Any) -> Any:
    """``(rows, columns, 4)``, whether it is drawn as shapes or as an image."""
    return np.asarray(axes.collections[0].get_array() if axes.collections else axes.images[0].get_array())


def _batch(features: int | None = None, lengths: list[int] = _LENGTHS) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.rand(sum(lengths), *([features] if features else [])), lengths=lengths)


def test_weights_of_each_head_stand_at_their_elements() -> None:
    pooling = rl.nn.AttentionPooling(6, heads=3)
    weights = pooling.weights(_batch(6))
    picture = plot.attention(weights)
    assert [axes.get_title(loc="left").split(":")[0] for axes in picture.axes] == [
        f"attention, head {head}" for head in range(3)
    ]
    for head, axes in enumerate(picture.axes):
        expected = {
            (step + 0.5, row + 0.5): f"{weight:.2g}"
            for row, sequence in enumerate(weights.to_list())
            for step, weight in enumerate(sequence[:, head].tolist())
        }
        assert _texts(axes) == expected


def test_colours_follow_the_numbers_and_none_stands_past_the_end() -> None:
    gate = _batch(1)
    axes = plot.gates({"forget": gate}).axes[0]
    colors = _colors(axes)
    padded, _ = gate.to_padded()
    expected = colormaps["viridis"](padded[:, :, 0].double().numpy())
    expected[~gate.mask().numpy()] = 0
    assert np.allclose(colors, expected)


def test_gates_are_means_and_norms_are_norms() -> None:
    batch = _batch(5)
    values = batch.values.double()
    norms = values.square().sum(1).sqrt()
    for picture, numbers in ((plot.gates({"i": batch}), values.mean(1)), (plot.norms(batch), norms)):
        shown = [text.get_text() for text in picture.axes[0].texts]
        assert shown == [f"{number:.3g}" if number >= 1 else f"{number:.2g}" for number in numbers.tolist()]


def test_states_of_a_layer() -> None:
    lstm = rl.nn.LSTM(6, 4)
    _, _, states = lstm(_batch(6), return_states=True)
    picture = plot.norms(dict(zip(("h", "c"), states[0], strict=True)))
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["norm of h: 4 sequences", "norm of c: 4 sequences"]


def test_labels_stand_in_the_elements() -> None:
    axes = plot.attention(_batch(), labels=["abc", "", ["$d"], ["e", "long" * 20]]).axes[0]
    texts = _texts(axes)
    assert [texts[0.5, 0.5], texts[2.5, 0.5], texts[0.5, 2.5], texts[0.5, 3.5]] == ["a", "c", "$d", "e"]
    assert texts[1.5, 3.5].endswith("…")


def test_what_is_not_finite_is_red_and_counted() -> None:
    states = rl.Ragged([torch.tensor([[1.0], [float("nan")]]), torch.tensor([[float("-inf")]])])
    axes = plot.norms({"h": states}).axes[0]
    colors = _colors(axes)
    assert [tuple(colors[place]) for place in ((0, 1), (1, 0))] == [to_rgba(VERMILION)] * 2
    assert tuple(colors[0, 0]) == colormaps["viridis"](1.0)
    assert axes.get_title(loc="left") == "norm of h: 2 sequences, not finite at 2 elements (red)"


def test_many_elements_are_an_image_with_the_same_colours() -> None:
    lengths = [7 * place for place in range(90)]
    gate = _batch(1, lengths)
    colors = _colors(plot.gates(gate).axes[0])
    assert colors.shape[:2] == (90, 623)
    padded, _ = gate.to_padded()
    expected = colormaps["viridis"](padded[:, :, 0].double().numpy())
    assert np.allclose(colors[gate.mask().numpy()], expected[gate.mask().numpy()])
    assert not colors[~gate.mask().numpy()].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_elements(lengths: list[int]) -> None:
    for picture in (
        plot.attention(_batch(2, lengths)),
        plot.gates(_batch(2, lengths)),
        plot.norms(_batch(2, lengths)),
    ):
        assert not picture.axes[0].texts
        picture.figure.canvas.draw()
