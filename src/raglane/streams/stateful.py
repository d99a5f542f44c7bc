"""Models that take the state as an argument and return it, as exported detectors do: each is served
as a cell, whose states are found by trying those of its cells and layers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raglane._utils.messages import quote_all
from raglane.errors import ArgumentTypeError, DispatchError
from raglane.nn import Recurrent
from raglane.programs.step import default_modes, replaced
from raglane.ragged import Ragged

_TRIED = 5  # sequences of a trial, a number that few models have as a size
_CLOSE = 1e-3  # largest difference of a row alone and next to others, of numbers about 1

CELLS: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.RNN: (nn.RNNCell, "nonlinearity"),
    nn.LSTM: (nn.LSTMCell, ""),
    nn.GRU: (nn.GRUCell, ""),
}


class _Leaf(NamedTuple):
    """One tensor of a state: its first value for one sequence, and its dimension of sequences."""

    start: Tensor
    dim: int


class _Trial(NamedTuple):
    """States that a model accepts, and the shape of its output."""

    form: Any  # of the arguments: nested tuples, with None for each tensor
    leaves: list[_Leaf]
    output: tuple[int, ...]


def states_of_forward(model: nn.Module) -> list[str]:
    """Return the names of the arguments after the first one that a model requires, or that it has a
    method ``initial_state`` for.
    """
    with suppress(TypeError, ValueError):  # a forward without a signature
        names = [
            name
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and (parameter.default is parameter.empty or _has_initial(model))
        ]
        return names[1:] if not _has_initial(model) else names[1:2]
    return []


def _has_initial(model: nn.Module) -> bool:
    return callable(getattr(model, "initial_state", None))


def as_cell(model: nn.Module, features: tuple[int, ...], names: Sequence[str]) -> nn.Module:
    """Return a module that maps a Ragged to a Ragged by a model of frames and states; raise if no
    states are found.
    """
    copies: dict[int, Any] = {
        id(layer): _LayerInStep(layer) for layer in model.modules() if type(layer) in CELLS
    }
    inner: nn.Module = replaced(model, lambda tensor: tensor, copies)
    for module in inner.modules():
        module.training = False
    reasons: list[str] = []
    with default_modes(grad=False):
        for form in _forms(model, len(names)):
            try:
                trial = _tried(inner, features, form)
            except Exception as error:  # of the model, which may raise anything
                reasons.append(str(error).partition("\n")[0].rstrip("."))
            else:
                return _LayerCell(_Cell(inner, features, trial), features, trial.output)
    raise _refused(model, names, reasons)


def _refused(model: nn.Module, names: Sequence[str], reasons: Sequence[str]) -> DispatchError:
    kind = type(model).__name__
    why = f" (the first that was tried: {reasons[0]})" if reasons else ""
    got = f"a {kind} whose forward takes {quote_all(names)}, for which no states were found{why}"
    rule = "a model that runs element by element"
    fix = (
        "give it a method initial_state(batch_size) that returns the first state; or write a cell "
        "with input_size, hidden_size, initial_state(batch_size) and step(x, state) that calls it "
        "on one frame of each sequence, and pass rl.nn.Recurrent(cell)"
    )
    return DispatchError("model", got, rule, fix)


# ---- forms of states -----------------------------------------------------------------------------


def _leaves_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples and lists."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves_of(item)
    elif isinstance(value, Tensor):
        yield value
    else:
        raise ArgumentTypeError(
            "state", f"a {type(value).__name__}", "tensors, or tuples of them", "return tensors"
        )


def _form_of(value: Any) -> Any:
    return tuple(map(_form_of, value)) if isinstance(value, tuple | list) else None


def _filled(form: Any, leaves: Iterator[Tensor]) -> Any:
    """Return nested tuples with tensors instead of None."""
    if form is None:
        return next(leaves)
    return tuple([_filled(item, leaves) for item in form])


def _cells_of(model: nn.Module) -> tuple[list[int], set[bool]]:
    """Return the size of each cell and layer of torch, and whether their states are pairs."""
    sizes: list[int] = []
    are_pairs: set[bool] = set()
    for module in model.modules():
        if isinstance(module, nn.RNNCellBase | nn.RNNBase):
            sizes += [module.hidden_size] * getattr(module, "num_layers", 1)
            are_pairs.add(isinstance(module, nn.LSTMCell | nn.LSTM))
    return sizes, are_pairs


def _forms(model: nn.Module, count: int) -> Iterator[Callable[[int], tuple[Any, ...]]]:
    """Yield functions of a number of sequences that return first states, one per argument: of the
    model's own method, or else zeros with shapes that its cells and layers have.
    """
    if _has_initial(model):
        initial: Any = model.initial_state
        yield lambda batch: (initial(batch),)
        return
    sizes, are_pairs = _cells_of(model)
    if len({*sizes}) != 1 or len(are_pairs) != 1:
        return
    size = sizes[0]
    depth = len(sizes)
    dtype = next((tensor.dtype for tensor in model.parameters()), torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    flat: list[Callable[[int], Any]] = [
        lambda batch: zeros(depth, batch, size),
        lambda batch: zeros(batch, depth, size),
        lambda batch: tuple([zeros(batch, size) for _ in range(depth)]),
        lambda batch: zeros(batch, depth * size),
    ]
    if depth == 1:
        flat.insert(0, lambda batch: zeros(batch, size))
    pairs: list[Callable[[int], Any]] = [
        lambda batch: zeros(2 * depth, batch, size),
        lambda batch: zeros(2, depth, batch, size),
        lambda batch: tuple([(zeros(batch, size), zeros(batch, size)) for _ in range(depth)]),
        lambda batch: zeros(batch, 2 * depth, size),
        lambda batch: zeros(batch, 2 * depth * size),
    ]
    whole = flat
    if are_pairs == {True}:
        whole = [*pairs, *[lambda batch, half=half: (half(batch), half(batch)) for half in flat]]
    for shape in whole if count == 1 else ():
        yield lambda batch, shape=shape: (shape(batch),)  # type: ignore[misc]
    single: list[Callable[[int], Any]] = [
        lambda batch: zeros(batch, size),
        lambda batch: zeros(1, batch, size),
    ]
    for shape in [*single, *flat] if count > 1 else ():
        yield lambda batch, shape=shape: tuple([shape(batch) for _ in range(count)])  # type: ignore[misc]


# ---- trials --------------------------------------------------------------------------------------


def _tried(
    model: nn.Module, features: tuple[int, ...], form: Callable[[int], tuple[Any, ...]]
) -> _Trial:
    """Return the form of states that a model accepts and returns; raise if it does not."""
    single = form(1)
    many = form(_TRIED)
    starts = list(_leaves_of(single))
    dims = list(starmap(_dim_of, zip(starts, _leaves_of(many), strict=True)))
    structure = _form_of(single)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator).to(starts[0].dtype)

    frames = drawn((_TRIED, *features))
    states = [start + drawn(start.shape) for start in _leaves_of(many)]
    output, after = _parts(model(frames, *_filled(structure, iter(states))), structure)
    shapes = [tuple(state.shape) for state in states]
    if [tuple(state.shape) for state in after] != shapes:
        got = f"states of shapes {[tuple(state.shape) for state in after]} from {shapes}"
        raise ArgumentTypeError("forward", got, "a state like its argument", "return it")
    if not isinstance(output, Tensor) or output.shape[:1] != (_TRIED,):
        got = f"an output of shape {tuple(getattr(output, 'shape', ()))} for {_TRIED} frames"
        raise ArgumentTypeError("forward", got, "a row per frame", "return one")
    for row in range(_TRIED):
        alone = [state.narrow(dim, row, 1) for state, dim in zip(states, dims, strict=True)]
        single, new = _parts(
            model(frames[row : row + 1], *_filled(structure, iter(alone))), structure
        )
        rows = [state.narrow(dim, row, 1) for state, dim in zip(after, dims, strict=True)]
        for tensor, whole in zip((single, *new), (output[row : row + 1], *rows), strict=True):
            if not torch.allclose(tensor.float(), whole.float(), _CLOSE, _CLOSE, True):
                got = "a row that depends on the other rows"
                raise ArgumentTypeError("forward", got, "one that depends on its row", "correct it")
    return _Trial(
        structure, list(starmap(_Leaf, zip(starts, dims, strict=True))), tuple(output.shape[1:])
    )


def _dim_of(single: Tensor, many: Tensor) -> int:
    """Return the dimension in which states of one and of several sequences differ."""
    differ = [dim for dim, size in enumerate(many.shape) if single.shape[dim : dim + 1] != (size,)]
    if single.dim() != many.dim() or len(differ) != 1 or many.shape[differ[0]] != _TRIED:
        got = f"shape {tuple(single.shape)} for one sequence, {tuple(many.shape)} for {_TRIED}"
        raise ArgumentTypeError("initial_state", got, "a dimension of sequences", "return one")
    return differ[0]


def _parts(result: Any, structure: tuple[Any, ...]) -> tuple[Any, list[Tensor]]:
    """Return the output and the states in a result."""
    if not isinstance(result, tuple | list) or len(result) < 2:
        got = f"a {type(result).__name__}"
        raise ArgumentTypeError("forward", got, "an output and a state", "return both")
    states = tuple(result[1:])
    if _form_of(states) != structure and len(states) == 1 and isinstance(states[0], tuple | list):
        states = tuple(states[0])
    if _form_of(states) != structure:
        rule = "a state of the form of its argument"
        raise ArgumentTypeError("forward", "another state", rule, "return it so")
    return result[0], list(_leaves_of(states))


# ---- modules -------------------------------------------------------------------------------------


class _Cell(nn.Module):
    """A model of frames and states as a cell: its states have a row per sequence."""

    def __init__(self, model: nn.Module, features: tuple[int, ...], trial: _Trial) -> None:
        super().__init__()
        self.input_size = math.prod(features)
        self.hidden_size = self.output_size = math.prod(trial.output)
        self.model = model
        self._features = features
        self._form = trial.form
        self._dims = [leaf.dim for leaf in trial.leaves]
        moved = [leaf.start.movedim(leaf.dim, 0) for leaf in trial.leaves]
        self._shapes = [tuple(start.shape[1:]) for start in moved]
        for index, start in enumerate(moved):
            self.register_buffer(f"start_{index}", start.detach().reshape(1, -1).clone())

    def initial_state(self, count: int) -> tuple[Tensor, ...]:
        """Return the first states of sequences."""
        starts = [self.get_buffer(f"start_{index}") for index in range(len(self._dims))]
        return tuple([start.expand(count, -1).clone() for start in starts])

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call the model on a frame of each sequence."""
        rows = x.shape[0]
        leaves = [
            tensor.reshape(rows, *shape).movedim(0, dim)
            for tensor, shape, dim in zip(state, self._shapes, self._dims, strict=True)
        ]
        frames = x.reshape(rows, *self._features)
        output, after = _parts(self.model(frames, *_filled(self._form, iter(leaves))), self._form)
        new = [
            tensor.movedim(dim, 0).reshape(rows, -1)
            for tensor, dim in zip(after, self._dims, strict=True)
        ]
        return output.reshape(rows, -1), tuple(new)


class _LayerCell(nn.Module):
    """A layer of a cell, with the shapes of frames and outputs."""

    def __init__(self, cell: nn.Module, features: tuple[int, ...], output: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = Recurrent(cell)
        self._is_flat = len(features) == 1
        self._output = output

    def forward(self, batch: Ragged) -> Ragged:
        flat = batch if self._is_flat else batch.map(lambda rows: rows.flatten(1))
        out: Ragged = self.layer(flat)[0]
        if len(self._output) == 1:
            return out
        return out.map(lambda rows: rows.reshape(rows.shape[0], *self._output))


class _LayerInStep(nn.Module):
    """A layer of torch that runs inside a step, as its cells: over a few steps, in one direction."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if layer.proj_size:
            rule = "a model that runs element by element"
            fix = "replace the layer by one without proj_size"
            raise DispatchError("model", f"a {layer} inside a step", rule, fix)
        kind, option = CELLS[type(layer)]
        options = {option: getattr(layer, option)} if option else {}
        self.cells = nn.ModuleList()
        for depth in range(layer.num_layers):
            width = layer.input_size if depth == 0 else layer.hidden_size
            cell = kind(width, layer.hidden_size, layer.bias, device="meta", **options)
            for name, _ in [*cell.named_parameters()]:
                setattr(cell, name, getattr(layer, f"{name}_l{depth}"))
            self.cells.append(cell)
        self._is_pair = kind is nn.LSTMCell
        for name in ("batch_first", "hidden_size", "input_size", "num_layers", "bidirectional"):
            setattr(self, name, getattr(layer, name))

    def flatten_parameters(self) -> None:
        """See :meth:`torch.nn.LSTM.flatten_parameters`; here without effect."""

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """See :class:`torch.nn.LSTM`, for a batch."""
        steps = list(input.unbind(1 if self.batch_first else 0))
        after: list[Any] = []
        for depth, cell in enumerate(self.cells):
            state: Any = None
            if hx is not None:
                state = (hx[0][depth], hx[1][depth]) if self._is_pair else hx[depth]
            for index, step in enumerate(steps):
                state = cell(step, state)
                steps[index] = state[0] if self._is_pair else state
            after.append(state)
        output = torch.stack(steps, 1 if self.batch_first else 0)
        if self._is_pair:
            return output, tuple([torch.stack(tensor) for tensor in zip(*after, strict=True)])
        return output, torch.stack(after)
