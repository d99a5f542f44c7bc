"""Messages say what was given and why it cannot be, and then the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import raglane as rl
from raglane.errors import ArgumentTypeError, ExportError, RaglaneError

MESSAGES: dict[str, tuple[Any, str]] = {
    "a function across sequences": (
        lambda r: F.conv1d(r, torch.ones(4, 4, 1)),
        "conv1d does not accept a Ragged, because it would read across the ends of sequences. "
        "Use rl.nn.Conv1d, ",
    ),
    "a method of a tensor": (
        lambda r: r.view(3, 4),
        "A Ragged does not have the attribute view of a tensor, because sequences and steps stay "
        "the first two dimensions. Call r.flatten(2), ",
    ),
    "in place": (
        lambda r: r.relu_(),
        "A Ragged does not have the attribute relu_ of a tensor, because a Ragged is immutable. "
        "Use the function of the same name without an underscore",
    ),
    "a gradient": (
        lambda r: r.grad,
        "A Ragged does not have the attribute grad of a tensor, because its values are the tensor "
        "of the graph. Use those, e.g. r.values.grad",
    ),
    "a pack": (
        lambda r: torch.nn.utils.rnn.pad_packed_sequence(r),
        "A Ragged does not have the attribute batch_sizes of a PackedSequence. Call r.to_padded()",
    ),
    "several last steps": (
        lambda r: r.last(2),
        "the arguments of last must be (*, empty=0.0), got (2). Index r[:, -2:] for the last 2",
    ),
    "a dimension of last": (
        lambda r: r.last(dim=1),
        "the arguments of last must be (*, empty=0.0), got (dim=1). Index r[:, -2:]",
    ),
    "several first steps": (lambda r: r.first(2), "got (2). Index r[:, :2] for the first 2 steps"),
    "an argument that misses": (
        lambda r: r.truncate(),
        "the arguments of truncate must be (length), got (). Pass those.",
    ),
    "a step that is not there": (
        lambda r: r[:, 7],
        "each length must be at least 8 for index of the steps, got a sequence with fewer steps.",
    ),
    "a product over steps": (
        lambda r: r @ r,
        "the operands of matmul must be a Ragged and a vector or matrix of its features, because "
        "steps differ in number, got (2, *, 4) and (2, *, 4). Call r @ matrix",
    ),
    "a condition alone": (lambda r: torch.where(r > 0), "got only a Ragged. Pass those, or"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    call, says = MESSAGES[name]
    batch: Any = rl.Ragged([torch.randn(2, 4), torch.randn(1, 4)])
    with pytest.raises((RaglaneError, AttributeError), match=re.escape(says)) as raised:
        call(batch)
    assert "\n" not in str(raised.value)


def test_an_error_within_a_method_is_its_own() -> None:
    class Broken:
        def __index__(self) -> int:
            raise TypeError("broken")

    with pytest.raises(TypeError) as raised:
        rl.Ragged([[1.0]]).shift(Broken())  # type: ignore[arg-type]
    assert "arguments of shift" not in str(raised.value)


def test_methods_with_explained_arguments_are_compiled_and_documented() -> None:
    batch = rl.Ragged([torch.randn(2, 4), torch.randn(3, 4)])

    def function(r: rl.Ragged) -> torch.Tensor:
        return r.shift(1).last() + r.first(empty=1.0)

    compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch), function(batch))
    assert "empty" in str(rl.Ragged.last.__doc__)
    assert rl.Ragged.last.__name__ == "last"


def test_an_export_of_torch_to_onnx_names_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, spec = pytree.tree_flatten(rl.Ragged([[1.0]]))
    assert isinstance(pytree.tree_unflatten(leaves, spec), rl.Ragged)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ExportError, match=r"Call rl\.export\.onnx\(model, path, example=batch\)"):
        pytree.tree_unflatten(leaves, spec)


def test_wrong_arguments_of_functions_are_named() -> None:
    batch: Any = rl.Ragged([[1.0, 2.0]])
    with pytest.raises(ArgumentTypeError, match="arguments of max must be those of torch: input"):
        batch.max(1, 2, 3, 4)
