"""Raglane's operators of torch, called with tensors that were cut, freed or replaced, next to guard
pages.

A round repeats a call that an ordinary program made, with one or several of its tensors changed. If
the changes keep the numbers, the results must be the same. Any other call must raise, return
nothing, or return the same results because it does not read the tensor. An access beyond a tensor
ends the process with a signal.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import raglane as rl
from cpu_networks import LIBRARY, POISON
from fuzz.memory import HARMLESS, WRONG, Change
from guarded import chosen_library, guarded
from raglane.kernels.cpu import steps
from raglane.kernels.cpu.steps import AttentionStep
from raglane.native import library
from served_models import Leaky

LENGTHS = [4, 0, 3]
_ABSURD = [-1, -(2**63), 7, 2**40, 2**62]


def _strided(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a view without torch's check that the storage is large enough."""
    view: Tensor = torch.ops.inductor._reinterpret_tensor(tensor, list(sizes), list(strides), 0)
    return view


def _cut(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, the second half of which is an unreadable page."""
    whole = tensor.contiguous()
    half = guarded(whole.view(-1)[: max(1, whole.numel() // 2)])
    return _strided(half, whole.shape, whole.stride())


def _cut_and_apart(tensor: Tensor) -> Tensor:
    """Return the first number of each pair in memory that ends before the last pairs."""
    strides = [2 * stride for stride in tensor.contiguous().stride()]
    return _strided(guarded(tensor.contiguous().view(-1)), tensor.shape, strides)


def _absurd(tensor: Tensor) -> Tensor:
    """Return integers of which one is out of all bounds."""
    if tensor.dtype is not torch.int64 or not tensor.numel():
        raise NotImplementedError
    copy = tensor.clone()
    numbers = copy.view(-1)
    chance = random.Random(numbers.numel() + int(numbers[-1]))
    numbers[chance.randrange(len(numbers))] = chance.choice(_ABSURD)
    return copy


_SAME: dict[str, Change] = {**HARMLESS, "contiguous": Tensor.contiguous}
_OTHER: dict[str, Change] = {
    **WRONG,
    "cut": _cut,
    "cut and apart": _cut_and_apart,
    "empty and strided": lambda t: t.new_empty(0, *t.shape[1:], 2)[..., 0],
    "overlapping": lambda t: t.reshape(-1)[:1].expand(t.shape),
    "huge": lambda t: t.reshape(-1)[:1].expand(2**40, *t.shape[1:]),
    "nested": lambda t: torch.nested.as_nested_tensor([t, t]),
    "compressed": lambda t: t.to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "foreign layout": lambda t: t.to_mkldnn(),
    "absurd": _absurd,
}
CHANGES = {**_SAME, **_OTHER}
# Changes after which a result that is not refused must be that of the unchanged tensors: they keep
# the numbers, or take them away.
_COMPARED = {*_SAME, "freed", "shrunk", "stretched", "cut", "cut and apart", "on meta"}


# ---- the operators, and calls of each ------------------------------------------------------------


def names() -> set[str]:
    """Return the names of all operators that torch has registered for Raglane."""
    package = Path(rl.__file__).parent
    for path in package.rglob("*.py"):
        if '"raglane::' in path.read_text():
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            importlib.import_module(module)
    library.operators()
    registered = torch._C._dispatch_get_all_op_names()
    return {name for name in registered if name.startswith("raglane")}


@dataclass
class Call:
    """A call of an operator: its name, its arguments and the places of the tensors among them."""

    name: str
    leaves: list[Any]
    spec: Any
    tensors: list[int]

    @classmethod
    def of(cls, name: str, arguments: Sequence[Any]) -> Call:
        """Record a call, with copies of its tensors."""
        copies = tree_map_only(Tensor, lambda part: part.detach().clone(), tuple(arguments))
        leaves, spec = tree_flatten(copies)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return cls(name, leaves, spec, places)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what two calls have in common that a test need not make both of."""
        kinds = [
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        ]
        return (self.name, *map(str, kinds))

    def run(self, changes: dict[int, str], *, before: bool = False) -> list[Any]:
        """Call the operator with copies of the tensors, some of which are changed.

        Raises:
            Exception: torch cannot make the change, or the operator refuses it.
        """
        leaves = list(self.leaves)
        for place in self.tensors:
            leaves[place] = guarded(leaves[place], before=before)
        for place, change in changes.items():
            leaves[place] = CHANGES[change](leaves[place])
        namespace, name = self.name.split("::")
        operator = getattr(getattr(torch.ops, namespace), name)
        found, _ = tree_flatten(operator(*tree_unflatten(leaves, self.spec)))
        return found


class _Recorded(TorchDispatchMode):
    """Records the calls of Raglane's operators that are made within the block."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, _ = func.name().partition(".")
        if name.startswith("raglane"):
            self._calls.append(Call.of(name, args))
        return func(*args, **(kwargs or {}))


def _layers() -> Iterator[tuple[Any, bool]]:
    """Yield layers, and True for those that a call on packed weights is made of."""
    yield rl.nn.LSTM(5, 4, proj_size=3, bidirectional=True), False
    yield rl.nn.GRU(5, 4), True
    yield rl.nn.SRU(5, 4), True
    yield rl.nn.QRNN(5, 4), False
    yield rl.nn.LSTM(5, 4, 2), True


def _run_layers() -> None:
    batch = rl.Ragged.from_flat(torch.randn(sum(LENGTHS), 5), lengths=LENGTHS)
    lengths = torch.tensor(LENGTHS)
    own = rl.nn.Recurrent(Leaky, 5, 4)
    for kind in (*_layers(), (own, False)):
        layer, is_packed = kind
        dtype = next(layer.parameters()).dtype
        flat = batch.values.to(dtype)
        padded = rl.Ragged.from_flat(flat, lengths=LENGTHS).to_padded(batch_first=False)[0]
        flat, padded = flat.requires_grad_(), padded.detach().requires_grad_()
        out, final = layer(rl.Ragged.from_flat(flat, lengths=LENGTHS))
        loss = out.values.square().sum() + torch.cat([part.view(-1) for part in parts(final)]).sum()
        loss.backward()
        layer(padded, lengths=lengths)[0].sum().backward()
        for packed in (False, True)[: 1 + is_packed]:
            model = rl.pack_weights(layer.eval()) if packed else layer
            with torch.no_grad():
                model(rl.Ragged.from_flat(flat, lengths=LENGTHS))
                model(padded, lengths=lengths)
                model(padded[:1])  # one step of equal lengths


def parts(final: Any) -> tuple[Tensor, ...]:
    """Return the final states of a layer."""
    return final if isinstance(final, tuple) else (final,)


def _run_packs() -> None:
    packed = rl.Ragged.from_flat(torch.randn(sum(LENGTHS), 5), lengths=LENGTHS).to_packed()
    for layer, _ in _layers():
        data = packed.data.clone().requires_grad_()
        layer(packed._replace(data=data))[0].data.sum().backward()
        with torch.no_grad():
            layer(packed)


def _run_program() -> None:
    values = torch.randn(sum(LENGTHS), 5).requires_grad_()
    layer = rl.nn.GRU(5, 4, backend="program")
    layer(rl.Ragged.from_flat(values, lengths=LENGTHS))[0].values.sum().backward()


def _run_losses() -> None:
    torch.manual_seed(0)
    scores = rl.Ragged.from_flat(torch.randn(sum(LENGTHS), 4).requires_grad_(), lengths=LENGTHS)
    log_probs = scores.map(lambda values: values.log_softmax(-1))
    targets = rl.Ragged([[1, 2], [], [3]])
    rl.transduction.ctc_loss(log_probs, targets).backward(retain_graph=True)
    predicted = rl.Ragged.from_flat(torch.randn(6, 4).requires_grad_(), lengths=[3, 1, 2])
    rl.transduction.rnnt_loss(scores, predicted, targets, torch.add).backward()
    crf = rl.nn.CRF(4)
    tags = rl.Ragged.from_flat(torch.tensor([0, 1, 2, 3, 0, 1, 2]), lengths=LENGTHS)
    crf.loss(scores, tags).backward()
    crf.marginals(scores)
    crf.decode(scores)


def _run_recurrences() -> None:
    lengths = [40, 0, 3]

    def drawn(*shape: int) -> rl.Ragged:
        return rl.Ragged.from_flat(torch.randn(43, *shape).requires_grad_(), lengths=lengths)

    def run(results: Any) -> None:
        out, state = results
        total = out.values.sum() + torch.cat([part.view(-1) for part in parts(state)]).sum()
        total.backward()

    for resets in (None, rl.Ragged.from_flat(torch.arange(43) == 35, lengths=lengths)):
        scanned = drawn(6), drawn(6), -torch.rand(6, 3), drawn(2, 3), drawn(2, 3)
        run(rl.nn.selective_scan(*scanned, torch.randn(6), softplus=True, resets=resets))
        for delta in (True, False):
            decays = drawn(2).map(torch.nn.functional.logsigmoid)
            gains: Any = {"gain" if delta else "log_gain": drawn(2)}
            attended = drawn(1, 5), drawn(1, 5), drawn(2, 4), decays
            run(rl.nn.linear_attention(*attended, **gains, delta=delta, resets=resets))
    run(rl.nn.RGLRU(6, 4)(drawn(6)))


@torch.no_grad()
def _run_steps() -> None:
    for name in ("Mamba", "Mamba2", "GatedDeltaNet", "MLSTM", "RGLRU"):
        layer = getattr(rl.nn, name)(5, 4)
        _, state = layer.step(torch.randn(2, 5))
        layer.step(torch.randn(2, 5), state)
    for is_delta in (False, True):
        parts: list[Any] = [torch.randn(26, 1, 3), None, *torch.randn(3, 2).unbind()]
        options: dict[str, Any] = {"unit": is_delta, "delta": is_delta}
        step = AttentionStep([*parts, torch.randn(10)], 1, 2, 8, 5, (0, 8, 16), 2, 1e-3, **options)
        rows = torch.randn(3, 1, 40).split([26, 10, 2, 2], 2)
        states = torch.randn(3, 26, 3), torch.randn(3, 2, 8, 5)
        step.run(rows[0], rows[1], rows[2], rows[3] if is_delta else None, *states)


def _run_layer_operator(calls: list[Call]) -> None:
    values, state = torch.randn(sum(LENGTHS), 5), torch.zeros(1, 3, 4)
    offsets = torch.tensor([0, 4, 4, 7])
    for layer, cell in ((rl.nn.LSTM(5, 4), "lstm"), (rl.nn.GRU(5, 4), "gru")):
        weights = [part for direction in layer._weights() for part in direction]
        c = state.clone() if cell == "lstm" else None
        calls.append(Call.of("raglane::layer", [cell, values, offsets, state, c, weights]))


@cache
def calls() -> list[Call]:
    """Return different calls of all operators, recorded from ordinary programs."""
    made: list[Call] = []
    operators = library.operators()
    assert operators is not None

    def recorded(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            made.append(Call.of(f"raglane::{name}", arguments))
            return operator(*arguments)

        return call

    in_cpp = library.Operators._fields
    wrapped = [recorded(*pair) for pair in zip(in_cpp, operators, strict=True)]

    def recorded_step(name: str) -> Any:
        return recorded(name, getattr(torch.ops.raglane, name))

    torch.manual_seed(0)
    # Numbers that are not computed are NaN, so that results can be compared.
    with chosen_library(replace(LIBRARY, flags=POISON)):
        with mock.patch.object(library, "operators", return_value=library.Operators(*wrapped)):
            _run_layers()
            _run_packs()
        with mock.patch.object(steps, "_operator", recorded_step):
            _run_steps()
        with _Recorded(made):
            _run_layers()
            _run_program()
            _run_losses()
            _run_recurrences()
        _run_layer_operator(made)
    return list({call.key: call for call in made}.values())


# ---- rounds --------------------------------------------------------------------------------------


def _outcome(call: Call, changes: dict[int, str], *, before: bool = False) -> list[Any] | None:
    """Return the results of a call; None if it was refused, or torch cannot make the changes."""
    try:
        answer = call.run(changes, before=before)
    except Exception:  # whatever torch raises for tensors of such kinds
        return None
    # Some operators also return a status and a reason.
    found = [part for part in answer if isinstance(part, Tensor)]
    if any(part.is_meta for part in found):
        return None
    # Reading all results finds those in memory that is not theirs.
    return [part.detach().clone() for part in found] or None


_results: dict[int, list[Any] | None] = {}


def _unchanged(call: Call) -> list[Any] | None:
    """Return the results of a call of :func:`calls` without changes."""
    if id(call) not in _results:
        _results[id(call)] = _outcome(call, {})
    return _results[id(call)]


def check(call: Call, changes: dict[int, str], *, before: bool = False) -> None:
    """Make a call with changed tensors, and raise AssertionError if its results are wrong."""
    what = f"{call.name}: {', '.join(f'{change} {place}' for place, change in changes.items())}"
    found = _outcome(call, changes, before=before)
    changed = set(changes.values())
    if found is None or not changed <= _COMPARED:
        return
    wanted = _unchanged(call)
    assert wanted is not None, f"{what}: the unchanged call was refused"
    for index, pair in enumerate(zip(found, wanted, strict=True)):
        is_close = pair[0].shape == pair[1].shape and torch.allclose(*pair, equal_nan=True)
        assert is_close, f"{what}: result {index} has other numbers"


def singles(call: Call) -> Iterator[tuple[int, str]]:
    """Yield the place of each tensor of a call with each change."""
    for place in call.tensors:
        for change in CHANGES:
            yield place, change


def drawn(chance: random.Random) -> tuple[Call, dict[int, str]]:
    """Return a call with random changes of several of its tensors."""
    call = chance.choice(calls())
    count = chance.randint(1, min(4, len(call.tensors)))
    return call, {
        place: chance.choice(list(CHANGES)) for place in chance.sample(call.tensors, count)
    }


def play(number: int) -> None:
    chance = random.Random(number)
    call, changes = drawn(chance)
    check(call, changes, before=chance.random() < 0.3)
