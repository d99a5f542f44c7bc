"""Layers under PyTorch's transformations: every cell of the table in docs/transformations.md."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

import raglane as rl
from raglane.errors import RaglaneError
from raglane.native import missing_kernels

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

LENGTHS = [3, 0, 1, 2]
# Without an empty sequence: torch's own kernels, which torch.jit.trace knows, have none.
PACKED = rl.Ragged.from_flat(torch.zeros(6, 2), lengths=[3, 1, 2]).to_packed()
KINDS = ("Ragged", "PackedSequence", "padded", "dense")
BACKENDS = ("cpu", "torch", "reference")


def leaf_of(kind: str) -> Tensor:
    """The tensor of an input that holds its elements."""
    torch.manual_seed(1)
    shapes = {"Ragged": (6, 2), "PackedSequence": (6, 2), "padded": (4, 5, 2), "dense": (3, 4, 2)}
    return torch.randn(shapes[kind], dtype=torch.float64)


_COMPILES_PADDING = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Around(nn.Module):
    """A layer with one tensor in and one out, whatever kind of input it is given inside."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, leaf: Tensor) -> Tensor:
        if self.kind == "Ragged":
            out, state = self.layer(rl.Ragged.from_flat(leaf, lengths=LENGTHS))
            out = out.values
        elif self.kind == "PackedSequence":
            out, state = self.layer(PackedSequence(leaf, *PACKED[1:]))
            out = out.data
        else:
            options = {"lengths": torch.tensor(LENGTHS)} if self.kind == "padded" else {}
            out, state = self.layer(leaf, **options)
        h = state[0] if isinstance(state, tuple) else state
        return torch.cat([out.flatten(), h.flatten()])


def build(backend: str, cell: str = "LSTM") -> Any:
    torch.manual_seed(2)
    return getattr(rl.nn, cell)(2, 3, bidirectional=True, batch_first=True, backend=backend, dtype=torch.float64)


def cells_of(backend: str, name: str) -> tuple[str, ...]:
    # What torch.compile leaves out of its graphs it leaves out whatever the cell is.
    is_left_out = backend == "reference" and name.startswith("torch.compile")
    return ("LSTM",) if backend == "torch" or is_left_out else ("LSTM", "SRU")


def loss_of(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda leaf: module(leaf).square().sum()


# ---- what each transformation does, and what it must give ---------------------------------------------------------
#
# Each is given a module and its leaf, and returns what it computed and what plain autograd makes of the same.

Pair = tuple[Any, Any]


def gradient(module: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    leaf = leaf.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(module)(leaf), leaf)
    return found


def jacobian(module: nn.Module, leaf: Tensor) -> Tensor:
    found: Tensor = torch.autograd.functional.jacobian(module, leaf)
    return found


def scaled(module: nn.Module, factor: float) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(factor)
    return twin


def stacked(module: nn.Module) -> dict[str, Tensor]:
    """The weights of two networks at once."""
    return {name: torch.stack([part.detach(), part.detach() * 0.5]) for name, part in module.named_parameters()}


def over_weights(module: nn.Module, leaf: Tensor) -> Pair:
    found = vmap(lambda weights: functional_call(module, weights, (leaf,)))(stacked(module))
    return found, torch.stack([module(leaf), scaled(module, 0.5)(leaf)])


def per_sample(module: nn.Module, leaf: Tensor) -> Pair:
    weights = {name: part.detach() for name, part in module.named_parameters()}
    leaves = torch.stack([leaf, leaf * 2])

    def loss(weights: dict[str, Tensor], leaf: Tensor) -> Tensor:
        out: Tensor = functional_call(module, weights, (leaf,))
        return out.square().sum()

    found = vmap(grad(loss), (None, 0))(weights, leaves)
    each = [torch.autograd.grad(loss_of(module)(part), list(module.parameters())) for part in leaves]
    return list(found.values()), [torch.stack(parts) for parts in zip(*each, strict=True)]


def batched_gradients(module: nn.Module, leaf: Tensor) -> Pair:
    leaf = leaf.clone().requires_grad_()
    out = module(leaf)
    given = torch.stack([torch.ones_like(out), torch.linspace(-1, 1, out.numel(), dtype=out.dtype)])
    inputs = [leaf, *module.parameters()]
    found = torch.autograd.grad(out, inputs, given, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, inputs, part, retain_graph=True) for part in given]
    return list(found), [torch.stack(parts) for parts in zip(*each, strict=True)]


def forward_derivative(module: nn.Module, leaf: Tensor) -> Pair:
    """In the values, and in a weight and an initial state besides."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(module(forward_ad.make_dual(leaf, torch.ones_like(leaf)))).tangent
        name, weight = next(iter(module.named_parameters()))
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        of_weight = forward_ad.unpack_dual(functional_call(module, {name: dual}, (leaf,))).tangent
    wanted = torch.autograd.functional.jvp(
        lambda weight: functional_call(module, {name: weight}, (leaf,)), weight.detach(), torch.ones_like(weight)
    )[1]
    return [found, of_weight], [jacobian(module, leaf).flatten(1).sum(1), wanted]


def second_derivatives(module: nn.Module, leaf: Tensor) -> Pair:
    leaf = leaf.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(module)(leaf), leaf, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), leaf)
    wanted = 2 * hessian(loss_of(module))(leaf.detach()).flatten(leaf.dim()).flatten(0, -2) @ first.detach().flatten()
    return found.flatten(), wanted


def with_gradient(module: Callable[[Tensor], Tensor], leaf: Tensor) -> list[Tensor]:
    leaf = leaf.clone().requires_grad_()
    out = module(leaf)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaf)]


def compiled(module: nn.Module, leaf: Tensor, **options: Any) -> Pair:
    torch._dynamo.reset()
    # Around a break in the graph are many small ones, and to take each apart adds nothing.
    backend = "aot_eager" if module.layer.backend == "cpu" else "eager"  # type: ignore[union-attr]
    return with_gradient(torch.compile(module, backend=backend, **options), leaf), with_gradient(module, leaf)


def exported(module: nn.Module, leaf: Tensor) -> Pair:
    with torch.no_grad():
        program = torch.export.export(module, (leaf,))
        return program.module()(leaf * 2), module(leaf * 2)


def jit_traced(module: nn.Module, leaf: Tensor) -> Pair:
    with torch.no_grad():
        traced = torch.jit.trace(module, (leaf,))
        return traced(leaf * 2), module(leaf * 2)


def through_make_fx(module: nn.Module, leaf: Tensor) -> Pair:
    with torch.no_grad():
        return make_fx(module)(leaf)(leaf * 2), module(leaf * 2)


def autocast(module: nn.Module, leaf: Tensor) -> Pair:
    twin = copy.deepcopy(module).float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = twin(leaf.float())
    return found.double(), module(leaf)


TRANSFORMATIONS: dict[str, Callable[[nn.Module, Tensor], Pair]] = {
    "torch.func.grad": lambda m, x: (grad(loss_of(m))(x), gradient(m, x)),
    "torch.func.vjp": lambda m, x: (vjp(m, x)[1](2 * m(x))[0], gradient(m, x)),
    "torch.func.jvp": lambda m, x: (
        jvp(m, (x,), (torch.ones_like(x),))[1],
        jacobian(m, x).flatten(1).sum(1),
    ),
    "torch.func.jacrev": lambda m, x: (jacrev(m)(x), jacobian(m, x)),
    "torch.func.jacfwd": lambda m, x: (jacfwd(m)(x), jacobian(m, x)),
    "torch.func.hessian": lambda m, x: (
        hessian(loss_of(m))(x),
        torch.autograd.functional.hessian(loss_of(m), x),
    ),
    "vmap over inputs": lambda m, x: (vmap(m)(torch.stack([x, x * 2])), torch.stack([m(x), m(x * 2)])),
    "vmap over weights": over_weights,
    "gradients per sample": per_sample,
    "autograd.grad(is_grads_batched=True)": batched_gradients,
    "jacobian(vectorize=True)": lambda m, x: (
        torch.autograd.functional.jacobian(m, x, vectorize=True),
        jacobian(m, x),
    ),
    'jacobian(vectorize=True, strategy="forward-mode")': lambda m, x: (
        torch.autograd.functional.jacobian(m, x, vectorize=True, strategy="forward-mode"),
        jacobian(m, x),
    ),
    "torch.autograd.forward_ad": forward_derivative,
    "create_graph=True": second_derivatives,
    "torch.utils.checkpoint": lambda m, x: (
        gradient(lambda leaf: checkpoint(m, leaf, use_reentrant=False), x),
        gradient(m, x),
    ),
    "torch.autocast": autocast,
    "torch.compile": compiled,
    "torch.compile(fullgraph=True)": lambda m, x: compiled(m, x, fullgraph=True),
    "torch.export.export": exported,
    "make_fx": through_make_fx,
    "torch.jit.trace": jit_traced,
    "torch.jit.script": lambda m, x: (torch.jit.script(m)(x), m(x)),
    "torch.fx.symbolic_trace": lambda m, x: (torch.fx.symbolic_trace(m)(x), m(x)),
}

REFUSALS: dict[str, str] = {
    "torch.compile(fullgraph=True)": r"`disable`|disable\(\)`|[Dd]ata-dependent|PendingUnbacked",
    "torch.export.export": "Fix: (export|pass)",
    "make_fx": "get value out of a tracing tensor",
    "torch.jit.trace": r"torch\.jit\.trace: got a layer LSTM; .* Fix: use torch\.export",
    "torch.jit.script": r"torch\.jit\.script: got a layer LSTM; .* Fix: use torch\.compile or torch\.export",
    "torch.fx.symbolic_trace": "is_leaf_module|symbolically traced|got a Proxy",
}


def table() -> dict[str, list[str]]:
    """The rows of the table in the documents: a cell for each kind of input."""
    text = (Path(__file__).parents[2] / "docs" / "transformations.md").read_text()
    rows = re.findall(r"^\| `([^|`\n]*)` " + 4 * r"\|([^|\n]*)" + r"\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells] for name, *cells in rows}


def works(cell: str, backend: str) -> bool:
    """Whether a cell of the table promises that a backend works."""
    return cell == "works" or (cell.startswith("works on ") and backend in re.split(r"\W+", cell))


def test_the_table_is_whole() -> None:
    assert list(table()) == list(TRANSFORMATIONS)
    for name, cells in table().items():
        assert all(re.fullmatch(r"works|refused|works on (cpu|torch)( and torch)?", cell) for cell in cells), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_cell_of_the_table(name: str) -> None:
    transform, cells = TRANSFORMATIONS[name], table()[name]
    for kind, cell in zip(KINDS, cells, strict=True):
        for backend in BACKENDS:
            for layer in cells_of(backend, name):
                place = (name, kind, backend, layer)
                module, leaf = Around(build(backend, layer), kind), leaf_of(kind)
                if works(cell, backend):
                    found, wanted = transform(module, leaf)
                    error = largest_error(found, wanted)
                    assert error < (0.1 if name == "torch.autocast" else 1e-9), (*place, error)
                elif layer == "LSTM":
                    with pytest.raises(Exception, match=REFUSALS[name]):
                        transform(module, leaf)


def largest_error(found: Any, wanted: Any) -> float:
    if isinstance(found, list | tuple):
        return max(largest_error(a, b) for a, b in zip(found, wanted, strict=True))
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found - wanted).detach().abs().max())


# ---- graphs that serve many batches -------------------------------------------------------------------------------


def random_batch(kind: str, seed: int, least: int = 1, most: int = 9) -> tuple[Any, dict[str, Any]]:
    """This many sequences of at most this many steps, as an input of a kind, and what is given beside it."""
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
    """Outputs, states and gradients of a layer, compiled or not, for a random batch."""
    given, options = random_batch(kind, seed)
    out, (h, c) = layer(given, **options)
    values = out.values if kind == "Ragged" else out
    grads = torch.autograd.grad(values.square().sum() + h.sum() + c.sum(), list(layer.parameters()))
    return [values.detach(), h.detach(), c.detach(), *grads]


@pytest.mark.parametrize("kind", ["Ragged", "padded", "dense"])
def test_the_number_of_graphs_over_twenty_batches(kind: str) -> None:
    """One for the sizes that came first, one for most others; torch sets sizes of 1, and equal ones, apart."""
    torch._dynamo.reset()
    layer = rl.nn.LSTM(2, 3, bidirectional=True, batch_first=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    twin = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in range(20):
        assert largest_error(results(twin, kind, seed), results(layer, kind, seed)) < 1e-5
    assert 2 <= counter.frame_count <= 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_pack_made_and_unmade_within_a_model() -> None:
    """By torch's functions and by ours, around our layers, torch's, and torch's after ``rl.accelerate``."""

    class Model(nn.Module):
        def __init__(self, layer: nn.Module, functions: Any) -> None:
            super().__init__()
            self.layer, self.functions = layer, functions

        def forward(self, padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            packed = self.functions.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
            out, (h, _) = self.layer(packed)
            return self.functions.pad_packed_sequence(out, batch_first=True)[0], h

    for make in (
        lambda: rl.nn.LSTM(2, 3),
        lambda: rl.nn.LSTM(2, 3, backend="torch"),
        lambda: rl.accelerate(nn.LSTM(2, 3)),
    ):
        # torch 2.11 and 2.12 cannot compile what unpacks a pack that comes from outside of the graph.
        for functions in (rnn, rl.packing) if _COMPILES_PADDING else (rl.packing,):
            torch._dynamo.reset()
            model = Model(make(), functions)
            twin = torch.compile(model, backend="eager")
            for lengths in ([4, 1, 2], [1, 5]):
                padded = torch.randn(len(lengths), 5, 2)
                found, wanted = twin(padded, torch.tensor(lengths)), model(padded, torch.tensor(lengths))
                assert largest_error(found, wanted) < 1e-6


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's own, when it loads
def test_exported_programs_run_other_batches() -> None:
    """Saved, loaded, and run with other numbers of sequences, steps and elements."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {
        "dense": {"input": {0: dynamic, 1: dynamic}},
        "padded": {"input": {0: dynamic, 1: dynamic}, "lengths": {0: dynamic}},
        "Ragged": {"input": [{0: dynamic}, {0: dynamic}]},
    }
    for cell in ("LSTM", "MinLSTM"):
        layer = getattr(rl.nn, cell)(2, 3, 2, bidirectional=True, batch_first=True)
        for kind, dims in shapes.items():
            given, options = random_batch(kind, 3, least=2)  # what is 1 in the example stays 1
            with torch.no_grad():
                program = torch.export.export(layer, (given,), options, dynamic_shapes=dims)
                stored = io.BytesIO()
                torch.export.save(program, stored)
                stored.seek(0)
                loaded = torch.export.load(stored).module()
                for seed in (3, 4, 5):
                    given, options = random_batch(kind, seed, least=2, most=3 * seed)
                    found, wanted = loaded(given, **options)[0], layer(given, **options)[0]
                    if kind == "Ragged":
                        found, wanted = found.values, wanted.values
                    assert largest_error(found, wanted) < 1e-6


# ---- after rl.accelerate --------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A model as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.LSTM(2, 3, 2, bidirectional=True, batch_first=True), nn.Linear(6, 4)

    def forward(self, padded: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(padded)[0])
        return scores


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
def test_what_knows_torchs_layers_knows_turned_ones() -> None:
    model, padded = rl.accelerate(Tagger()), torch.randn(4, 5, 2)
    other = torch.randn(2, 9, 2)
    traced = torch.jit.trace(model, (padded,))
    for program in (traced, torch.fx.symbolic_trace(model), torch.export.export(model, (padded,)).module()):
        assert largest_error(program(padded), model(padded)) < 1e-6
    assert largest_error(traced(other), model(other)) < 1e-6
    with pytest.raises(RaglaneError, match=r"call rl\.restore\(model\) before torch\.jit\.script\(model\)"):
        torch.jit.script(model)
    with pytest.warns(UserWarning, match=r"rl\.freeze\(model, dtype=torch\.int8\), or call rl\.restore"):
        partly = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
    assert isinstance(partly.encoder, rl.nn.LSTM)
    scripted = torch.jit.script(rl.restore(model))
    assert largest_error(scripted(other), model(other)) < 1e-6
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rl.restore.*")
        whole = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)
    assert not isinstance(whole.encoder, nn.LSTM)


@pytest.mark.filterwarnings("ignore")
def test_the_old_exporter_to_onnx_takes_turned_layers() -> None:
    onnx = pytest.importorskip("onnx")
    model, stored = rl.accelerate(Tagger()), io.BytesIO()
    torch.onnx.export(model, (torch.randn(4, 5, 2),), stored, dynamo=False)  # type: ignore[arg-type]
    kinds = {node.op_type for node in onnx.load_model_from_string(stored.getvalue()).graph.node}
    assert "LSTM" in kinds
