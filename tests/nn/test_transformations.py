"""Layers under PyTorch's transformations: every entry of the table in docs/transformations.md."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import raglane as rl
from every_layer import has_torch_lstm_under_autocast
from raglane.native import missing_kernels

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

LENGTHS = [3, 0, 1, 2]
# Without an empty sequence, which torch's kernels do not support; torch.jit.trace requires them.
PACKED = rl.Ragged.from_flat(torch.zeros(6, 2), lengths=[3, 1, 2]).to_packed()
KINDS = ("Ragged", "PackedSequence", "padded", "dense")


def leaf_of(kind: str) -> Tensor:
    """Draw the tensor with the elements of an input."""
    torch.manual_seed(1)
    shapes = {"Ragged": (6, 2), "PackedSequence": (6, 2), "padded": (4, 4, 2), "dense": (2, 3, 2)}
    return torch.randn(shapes[kind], dtype=torch.float64)


class Around(nn.Module):
    """A module from one tensor to one tensor around a layer, which is called with a kind of
    input.
    """

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


def build(backend: str, cell: str) -> Any:
    torch.manual_seed(2)
    return getattr(rl.nn, cell)(
        2, 3, bidirectional=True, batch_first=True, backend=backend, dtype=torch.float64
    )


def loss_of(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda leaf: module(leaf).square().sum()


#
# Each function returns its result for a module and an input, and the same computed with plain
# autograd.

Pair = tuple[Any, Any]


def gradient(module: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    leaf = leaf.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(module)(leaf), leaf)
    return found


def jacobian(module: nn.Module, leaf: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(module, leaf)


def scaled(module: nn.Module, factor: float) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(factor)
    return twin


def over_weights(module: nn.Module, leaf: Tensor) -> Pair:
    both = {
        name: torch.stack([part.detach(), part.detach() * 0.5])
        for name, part in module.named_parameters()
    }
    found = vmap(lambda weights: functional_call(module, weights, (leaf,)))(both)
    return found, torch.stack([module(leaf), scaled(module, 0.5)(leaf)])


def per_sample(module: nn.Module, leaf: Tensor) -> Pair:
    weights = {name: part.detach() for name, part in module.named_parameters()}
    leaves = torch.stack([leaf, leaf * 2])

    def loss(weights: dict[str, Tensor], leaf: Tensor) -> Tensor:
        out: Tensor = functional_call(module, weights, (leaf,))
        return out.square().sum()

    found = vmap(grad(loss), (None, 0))(weights, leaves)
    each = [
        torch.autograd.grad(loss_of(module)(part), list(module.parameters())) for part in leaves
    ]
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
    """In the values, also while a mode records operators, and in a weight."""
    with forward_ad.dual_level():
        with FlopCounterMode(display=False):
            recorded = forward_ad.unpack_dual(
                module(forward_ad.make_dual(leaf, torch.ones_like(leaf)))
            ).tangent
        found = forward_ad.unpack_dual(
            module(forward_ad.make_dual(leaf, torch.ones_like(leaf)))
        ).tangent
        name, weight = next(iter(module.named_parameters()))
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        of_weight = forward_ad.unpack_dual(functional_call(module, {name: dual}, (leaf,))).tangent
    wanted = torch.autograd.functional.jvp(
        lambda weight: functional_call(module, {name: weight}, (leaf,)),
        weight.detach(),
        torch.ones_like(weight),
    )[1]
    return [recorded, found, of_weight], [*[jacobian(module, leaf).flatten(1).sum(1)] * 2, wanted]


def second_derivatives(module: nn.Module, leaf: Tensor) -> Pair:
    leaf = leaf.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(module)(leaf), leaf, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), leaf)
    wanted = (
        2
        * hessian(loss_of(module))(leaf.detach()).flatten(leaf.dim()).flatten(0, -2)
        @ first.detach().flatten()
    )
    return found.flatten(), wanted


def with_gradient(module: Callable[[Tensor], Tensor], leaf: Tensor) -> list[Tensor]:
    leaf = leaf.clone().requires_grad_()
    out = module(leaf)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaf)]


def compiled(module: nn.Module, leaf: Tensor, **options: Any) -> Pair:
    torch._dynamo.reset()
    # A broken graph consists of many small ones, for which aot_eager is slow.
    backend = "aot_eager" if options and module.layer.backend == "cpu" else "eager"  # type: ignore[union-attr]
    return with_gradient(torch.compile(module, backend=backend, **options), leaf), with_gradient(
        module, leaf
    )


def exported(module: nn.Module, leaf: Tensor) -> Pair:
    with torch.no_grad():
        return torch.export.export(module, (leaf,)).module()(leaf * 2), module(leaf * 2)


def jit_traced(module: nn.Module, leaf: Tensor) -> Pair:
    with torch.no_grad():
        return torch.jit.trace(module, (leaf,))(leaf * 2), module(leaf * 2)


def through_make_fx(module: nn.Module, leaf: Tensor, **mode: Any) -> Pair:
    with torch.no_grad():
        return make_fx(module, **mode)(leaf)(leaf * 2), module(leaf * 2)


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
    "vmap over inputs": lambda m, x: (
        vmap(m)(torch.stack([x, x * 2])),
        torch.stack([m(x), m(x * 2)]),
    ),
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
    'make_fx(tracing_mode="symbolic")': partial(
        through_make_fx, tracing_mode="symbolic", _allow_non_fake_inputs=True
    ),
    "torch.jit.trace": jit_traced,
    "torch.jit.script": lambda m, x: (torch.jit.script(m)(x), m(x)),
    "torch.fx.symbolic_trace": lambda m, x: (torch.fx.symbolic_trace(m)(x), m(x)),
}

REFUSALS: dict[str, str] = {
    "torch.compile(fullgraph=True)": r"`disable`|disable\(\)`|[Dd]ata-dependent|PendingUnbacked",
    "torch.export.export": "(export|[Pp]ass)",
    "make_fx": "get value out of a tracing tensor",
    'make_fx(tracing_mode="symbolic")': "data-dependent|_local_scalar_dense|numpy|tracing",
    "torch.jit.trace": r"torch\.jit\.trace must be .*, got a layer LSTM. Use torch\.export",
    "torch.jit.script": r"torch\.jit\.script must be .*, got a layer LSTM. Use torch\.compile or torch\.export",
    "torch.fx.symbolic_trace": "is_leaf_module|symbolically traced|got a Proxy",
}


def table() -> dict[str, list[str]]:
    """Read the table of the page: for each transformation, an entry per kind of input."""
    text = (Path(__file__).parents[2] / "docs" / "transformations.md").read_text()
    rows = re.findall(r"^\| `([^|`\n]*)` " + 4 * r"\|([^|\n]*)" + r"\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells] for name, *cells in rows}


def entries() -> list[tuple[str, str, str, str]]:
    """Return transformations, kinds of input, backends and layers: all kinds on the cpu kernels,
    some on the others.
    """
    found = []
    for place, name in enumerate(TRANSFORMATIONS):
        found += [(name, kind, "cpu", "LSTM") for kind in KINDS]
        if name == "torch.compile":
            # A broken graph consists of many small ones, which take seconds.
            found += [(name, "dense", "torch", "LSTM")]
            continue
        some = ("Ragged", "dense")[place % 2 :][:1]
        found += [(name, kind, "torch", "LSTM") for kind in (KINDS if name in REFUSALS else some)]
        found += [(name, "padded", "reference", "LSTM")]
        if name not in REFUSALS:
            found += [(name, "Ragged", "cpu", "SRU")]
    return found


def works(cell: str, backend: str) -> bool:
    """Return True if an entry of the table includes a backend."""
    return cell == "works" or (cell.startswith("works on ") and backend in re.split(r"\W+", cell))


def test_the_table_is_complete() -> None:
    assert list(table()) == list(TRANSFORMATIONS)
    for name, cells in table().items():
        assert all(
            re.fullmatch(r"works|refused|works on (cpu|torch)( and torch)?", cell) for cell in cells
        ), name


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning"
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize(("name", "kind", "backend", "layer"), entries())
def test_every_cell_of_the_table(name: str, kind: str, backend: str, layer: str) -> None:
    if (name, kind, backend) == (
        "torch.autocast",
        "dense",
        "torch",
    ) and not has_torch_lstm_under_autocast("cpu"):
        pytest.skip("torch has no LSTM in bfloat16 on this processor, except for a PackedSequence")
    transform, cell = TRANSFORMATIONS[name], table()[name][KINDS.index(kind)]
    module, leaf = Around(build(backend, layer), kind), leaf_of(kind)
    if works(cell, backend):
        found, wanted = transform(module, leaf)
        most = 0.1 if name == "torch.autocast" else 1e-9
        torch.testing.assert_close(found, wanted, rtol=0, atol=most, check_dtype=False)
    else:
        with pytest.raises(Exception, match=REFUSALS[name]):
            transform(module, leaf)
