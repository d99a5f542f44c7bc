"""Each function of the table is right in a file of ONNX, or refused by its name.

``rl.export.onnx`` compares the file with the model on random lengths, and where the model raises
an error, such as for the maximum of an empty sequence, demands one of the file.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from face_entries import BATCH, OTHERS, REST, function_of, of_each, of_others
from raglane.errors import ExportError
from raglane.ragged.face import table

pytest.importorskip("onnxscript", reason="needs raglane[export]")
pytest.importorskip("onnxruntime", reason="needs raglane[export]")

# In place of expressions with a fixed number of sequences, and of float64, which ONNX Runtime
# supports in few operators.
OWN = {
    "bmm": "torch.bmm(x, x.mean(1)[..., None])",
    "bilinear": "F.bilinear(x, y, (w.T[:, :, None] * v).float())",
    "multilabel_soft_margin_loss": "F.multilabel_soft_margin_loss(x, m.float())",
    "binary_cross_entropy": "F.binary_cross_entropy(x.sigmoid(), m.float())",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits(x, m.float())",
    "empty_like": "torch.zeros_like(torch.empty_like(p))",  # of any numbers
    "expand_as": "x.sum(1)[:, None].expand_as(x)",
}


class Model(nn.Module):
    """The results of expressions."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.call = function_of(f"({', '.join(texts)},)")

    def forward(
        self, x: Any, y: Any, p: Any, z: Any, m: Any, i: Any, k: Any, t: Any, s: Any, q: Any
    ) -> Any:
        rest = dict(zip(REST, (y, p, z, m, i, k, t, s, q), strict=True))
        return list(self.call(x, **rest))


def narrow(value: Any) -> Any:
    return value.float() if value.dtype is torch.float64 else value


def export(texts: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in OTHERS.items():
        monkeypatch.setitem(OTHERS, name, narrow(value))
    example = (narrow(BATCH), *map(narrow, REST.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rl.export.onnx(Model(texts), folder / "model.onnx", example=example, layout="flat")


def zeros_for(session: Any, offsets: list[int]) -> dict[str, Any]:
    """Return the inputs of a file, of zeros."""
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    inputs = {
        each.name: np.zeros((offsets[-1], *each.shape[1:]), kinds[each.type])
        for each in session.get_inputs()
    }
    return inputs | {"offsets": np.array(offsets)}


def texts_of(is_refused: bool) -> dict[str, str]:
    """Return the expressions of entries that a file contains, or does not."""
    return {
        name: OWN.get(name, text)
        for name, text in (of_each() | of_others()).items()
        if bool({"onnx", "export"} & set(table.ROWS[name].refused.split())) == is_refused
    }


@pytest.mark.parametrize("part", range(24))
def test_right(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list(texts_of(is_refused=False).values())[part::24]
    exported = export(texts, tmp_path, monkeypatch)
    assert exported.verified.batches == 4


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = texts_of(is_refused=True)
    assert len(refused) > 40
    for name, text in refused.items():
        word = "complex" if name == "imag" else re.escape(name)
        with pytest.raises(ExportError, match=rf"^[^\n]*\b{word}\b[^\n]*Call it on the outputs"):
            export([text], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "text",
    ["x.amax(1)", "x.max(1)", "x.argmin(1)", "x.topk(1, 1)", "x[:, -1]", "x[:, [0, -1]]"],
)
def test_a_file_raises_where_steps_are_missing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is out of bounds takes the place of an assertion, which ONNX has not."""
    import onnxruntime

    export([text], tmp_path, monkeypatch)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for offsets, has_all in (([0, 1, 3], True), ([0, 3, 3], False), ([0, 0, 3], False)):
        inputs = zeros_for(session, offsets)
        if has_all:
            session.run(None, inputs)
            continue
        with pytest.raises(Exception, match=r"(?i)bounds|invalid index"):
            session.run(None, inputs)


def test_spreads_of_no_element_are_nan_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not zero divided by a negative number."""
    import onnxruntime

    texts = ["x.var()", "x.std(unbiased=False)", "x.var(correction=2)", "torch.var_mean(x)[0]"]
    export(texts, tmp_path, monkeypatch)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert np.isnan(session.run(None, zeros_for(session, [0, 0]))).all()


def test_nan_is_the_largest_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "x.masked_fill(m, float('nan')).amax(1, empty=0.0)",
        "x.masked_fill(m, float('nan')).sort(1)",
        "x.masked_fill(m, float('nan')).argsort(1, descending=True)",
        "x.masked_fill(m, float('nan')).max(1)",
        "torch.linalg.vector_norm(x.masked_fill(m, float('nan')), float('inf'), 1)",
    ]
    assert export(texts, tmp_path, monkeypatch).verified.elements
