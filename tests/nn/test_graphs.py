"""Graphs of layers for batches of any sizes, also of layers that rl.accelerate converted."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import rnn

import raglane as rl
from every_layer import results_of
from raglane import segments
from raglane.errors import RaglaneError
from raglane.native import missing_kernels

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
DYNAMIC = torch.export.Dim.DYNAMIC
_COMPILES_PADDING = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def random_batch(kind: str, seed: int, least: int = 1, most: int = 9) -> tuple[Any, dict[str, Any]]:
    """Draw an input of a kind, with numbers of sequences and steps from least to most, and its
    options.
    """
    torch.manual_seed(seed)
    count, steps = (int(size) for size in torch.randint(least, most, (2,)))
    lengths = torch.randint(0, steps + 1, (count,))
    lengths[0] = steps
    padded = torch.randn(count, steps, 2)
    if kind == "dense":
        return padded, {}
    if kind == "padded":
        return padded, {"lengths": lengths}
    return rl.Ragged.from_padded(padded, lengths), {}


def results(layer: Any, kind: str, seed: int) -> list[Tensor]:
    """Return outputs, states and gradients of a layer for a random batch."""
    given, options = random_batch(kind, seed)
    found = results_of(layer(given, **options))
    loss = torch.stack([part.square().sum() for part in found]).sum()
    return [part.detach() for part in found] + list(
        torch.autograd.grad(loss, list(layer.parameters()))
    )


@pytest.mark.parametrize(
    ("cell", "kind", "bidirectional"),
    [("GRU", "Ragged", True), ("LSTM", "padded", False), ("LayerNormLSTM", "dense", False)],
)
def test_the_number_of_graphs_over_ten_batches(cell: str, kind: str, bidirectional: bool) -> None:
    """One for the first sizes, one for most others; torch handles sizes of 1, and equal ones,
    separately.
    """
    torch._dynamo.reset()
    layer = getattr(rl.nn, cell)(2, 3, bidirectional=bidirectional, batch_first=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend(
        "aot_eager" if bidirectional else "eager"
    )
    twin = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in range(10):
        torch.testing.assert_close(
            results(twin, kind, seed), results(layer, kind, seed), rtol=0, atol=1e-5
        )
    assert 2 <= counter.frame_count <= 4


class Doubled(nn.LSTM):
    """A subclass that calls torch's forward."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        out, (h, c) = super().forward(input, hx)
        return out, (2 * h, c)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_pack_made_and_unmade_within_a_model() -> None:
    """With the functions of torch and of rl.packing, around our layers and converted ones."""

    class Model(nn.Module):
        def __init__(self, layer: nn.Module, functions: Any) -> None:
            super().__init__()
            self.layer, self.functions = layer, functions

        def forward(self, padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            packed = self.functions.pack_padded_sequence(
                padded, lengths, batch_first=True, enforce_sorted=False
            )
            out, (h, _) = self.layer(packed)
            return self.functions.pad_packed_sequence(out, batch_first=True)[0], h

    # torch 2.11 and 2.12 cannot compile what unpacks a pack that comes from outside of the graph,
    # and 2.15 no layer of torch whose subclass calls super().forward.
    theirs = rnn if _COMPILES_PADDING else rl.packing
    layers = [nn.LSTM(2, 3), Doubled(2, 3)][: 1 if torch.__version__.startswith("2.15") else 2]
    converted = [(rl.accelerate(layer), theirs) for layer in layers]
    for layer, functions in ((rl.nn.LSTM(2, 3), rl.packing), *converted):
        torch._dynamo.reset()
        model = Model(layer, functions)
        twin = torch.compile(model, backend="eager")
        for lengths in ([4, 1, 2], [1, 5]):
            padded = torch.randn(len(lengths), 5, 2)
            close(twin(padded, torch.tensor(lengths)), model(padded, torch.tensor(lengths)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_rules_of_the_forward_mode_are_no_part_of_graphs() -> None:
    layer, offsets, values = (
        rl.nn.IndRNN(2, 3, max_length=5),
        torch.tensor([0, 5, 7]),
        torch.randn(7, 2),
    )
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda given: layer(rl.Ragged.from_flat(given, offsets=offsets))[0].values,
        lambda given: segments.cumsum(given, offsets, 5),
    ]
    for function in functions:
        twin = torch.compile(function, backend="eager", fullgraph=True)
        given = values.clone().requires_grad_()
        found, wanted = (
            torch.autograd.grad(one(given).cos().sum(), given)[0] for one in (twin, function)
        )
        close(found, wanted)
        tangent = torch.func.jvp(lambda part: function(part).cos().sum(), (values,), (values,))[1]  # noqa: B023
        close(tangent, (wanted * values).sum())


_DYNAMIC_SIZES: dict[str, Any] = {
    "dense": {"input": {0: DYNAMIC, 1: DYNAMIC}},
    "padded": {"input": {0: DYNAMIC, 1: DYNAMIC}, "lengths": {0: DYNAMIC}},
    "Ragged": {"input": [{0: DYNAMIC}, {0: DYNAMIC}]},
}


@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning"
)  # torch 2.11's own, when it loads
@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("LSTM", "dense"),
        ("LSTM", "padded"),
        ("LSTM", "Ragged"),
        ("MinLSTM", "dense"),
        ("CausalConv1d", "padded"),
        ("CausalConv1d", "Ragged"),
    ],
)
@torch.no_grad()
def test_exported_programs_run_other_batches(cell: str, kind: str) -> None:
    """Saved, loaded, and run with other numbers of sequences, steps and elements."""
    dims = _DYNAMIC_SIZES[kind]
    more: dict[str, Any] = {} if cell == "CausalConv1d" else {"bidirectional": True}
    layer = getattr(rl.nn, cell)(2, 3, 2, batch_first=True, **more)
    given, options = random_batch(kind, 3, least=2)  # a size of 1 in the example becomes a constant
    stored = io.BytesIO()
    torch.export.save(torch.export.export(layer, (given,), options, dynamic_shapes=dims), stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for seed in (3, 4, 5):
        given, options = random_batch(kind, seed, least=2, most=3 * seed)
        found, wanted = loaded(given, **options)[0], layer(given, **options)[0]
        if kind == "Ragged":
            found, wanted = found.values, wanted.values
        close(found, wanted)


class Reversed(rl.nn.GRU):
    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        output = super().forward(batch)[0]
        return output.reverse().concat(output.shift(1)).values


def test_an_export_with_gradients_has_no_limit_of_elements() -> None:
    """Sizes up to which another kernel moves rows are not part of the graph."""
    model, dims = (
        Reversed(2, 8),
        {"batch": [{0: torch.export.Dim("elements")}, {0: torch.export.Dim("sequences") + 1}]},
    )
    few, many = (
        rl.Ragged([torch.randn(4, 2), torch.randn(2, 2)]),
        rl.Ragged([torch.randn(1000, 2), torch.randn(3000, 2)]),
    )
    close(torch.export.export(model, (few,), dynamic_shapes=dims).module()(many), model(many))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = (
            nn.LSTM(2, 3, 2, bidirectional=True, batch_first=True),
            nn.Linear(6, 4),
        )

    def forward(self, padded: Tensor) -> Tensor:
        return self.head(self.encoder(padded)[0])


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning"
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
def test_torchs_tools_accept_converted_layers() -> None:
    model, padded = rl.accelerate(Tagger()), torch.randn(4, 5, 2)
    other = torch.randn(2, 9, 2)
    traced = torch.jit.trace(model, (padded,))
    for program in (
        traced,
        torch.fx.symbolic_trace(model),
        torch.export.export(model, (padded,)).module(),
    ):
        close(program(padded), model(padded))
    close(traced(other), model(other))
    doubled = rl.accelerate(Doubled(2, 3))
    close(torch.jit.trace(doubled, (padded,))(other)[1][0], doubled(other)[1][0])
    with pytest.raises(
        RaglaneError, match=r"Call rl\.to_torch\(model\) before torch\.jit\.script\(model\)"
    ):
        torch.jit.script(model)
    with pytest.warns(UserWarning, match=r"rl\.quantize\(model\), or call rl\.to_torch"):
        partly = torch.ao.quantization.quantize_dynamic(
            model, {nn.LSTM, nn.Linear}, dtype=torch.qint8
        )
    assert isinstance(partly.encoder, rl.nn.LSTM)
    scripted = torch.jit.script(rl.to_torch(model))
    assert rl.explain(scripted).left == {"encoder": "it is compiled by torch.jit"}
    close(scripted(other), model(other))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rl.to_torch.*")
        whole = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)
    assert not isinstance(whole.encoder, nn.LSTM)


@pytest.mark.filterwarnings("ignore")
def test_the_old_onnx_exporter_accepts_converted_layers() -> None:
    onnx = pytest.importorskip("onnx")
    model, stored = rl.accelerate(Tagger()), io.BytesIO()
    torch.onnx.export(model, (torch.randn(4, 5, 2),), stored, dynamo=False)  # type: ignore[arg-type]
    assert "LSTM" in {
        node.op_type for node in onnx.load_model_from_string(stored.getvalue()).graph.node
    }


# torch's own compiler makes an instance of each autograd function that it meets.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")
def test_rows_of_large_batches_are_moved_in_one_graph() -> None:
    """Large rows are moved by another kernel."""
    values = torch.randn(3000, 8, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=[1000, 0, 2000])

    def moved(batch: Any) -> Tensor:
        return torch.cat([batch.reverse().values, batch.last()])

    compiled = torch.compile(moved, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(batch), moved(batch), rtol=0, atol=0)
    (own,) = torch.autograd.grad(compiled(batch).square().sum(), [values])
    (expected,) = torch.autograd.grad(moved(batch).square().sum(), [values])
    torch.testing.assert_close(own, expected, rtol=0, atol=0)
