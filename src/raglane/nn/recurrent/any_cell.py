"""Layers of user-defined cells, whose step is written in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_count, check_dropout, check_flag, check_signature
from raglane._utils.messages import quote
from raglane.cells import CELLS, CellSpec
from raglane.cells.module import ModuleCell
from raglane.cells.spec import Weights
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import Options, State, one_or_tuple, settings_of
from raglane.ragged import Ragged


class Recurrent(RecurrentLayer):
    """A recurrent layer of a user-defined cell.

    A cell is a module with ``input_size``, ``hidden_size`` and ``step(x_t, state) -> (output,
    state)``. ``x_t`` is ``(R, input_size)``, one row per running sequence; a row of the result must
    depend only on the same row. Optional:

    - ``initial_state(batch_size)`` returns a tensor ``(batch_size, size)`` or a tuple of them.
      Without it the state is one tensor of ``hidden_size`` zeros.
    - ``prepare(values, offsets)`` computes what does not depend on the state, for all elements at
      once, from ``(N, input_size)`` to ``(N, features)``; ``x_t`` is then a row of its result. Put
      matrix products here. It must not mix sequences, and ``offsets`` may have one sequence more
      than the batch.
    - ``output_size``, if outputs do not have ``hidden_size`` features.

    ``torch.nn.LSTMCell``, ``GRUCell`` and ``RNNCell`` are accepted too, and run on the fast
    kernels. States keep the dtype of the initial state. ``torch.compile`` includes the layer in its
    graph if the step can be traced to a program, and breaks the graph at its loop otherwise.

    Args:
        cell: a module, for one layer in one direction; or a function ``(input_size, hidden_size) ->
            module``, such as the module's class, for any number of layers and directions.
        input_size, hidden_size: the sizes for a function; a module has its own.
        num_layers, batch_first, dropout, bidirectional: as in torch's layers.
        **options: see :class:`~raglane.nn.recurrent.layer.RecurrentLayer`. ``state_dropout``,
            ``weight_dropout`` and ``zoneout`` require one of torch's cells.

    Raises:
        ArgumentTypeError: ``cell`` is neither such a module nor a function that returns one.
        ArgumentError: sizes are missing or do not match.

    Example:
        >>> class Leaky(nn.Module):
        ...     def __init__(self, input_size, hidden_size):
        ...         super().__init__()
        ...         self.input_size, self.hidden_size = input_size, hidden_size
        ...         self.linear = nn.Linear(input_size, hidden_size)
        ...     def step(self, x_t, state):
        ...         state = 0.9 * state + self.linear(x_t)
        ...         return state.tanh(), state
        >>> layer = Recurrent(Leaky, 3, 4, num_layers=2, bidirectional=True)
        >>> out, state = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, state.shape
        (torch.Size([7, 8]), torch.Size([4, 2, 4]))
    """

    def __init__(
        self,
        cell: nn.Module | Callable[[int, int], nn.Module],
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        self.num_layers = check_count("num_layers", num_layers)
        self.batch_first = check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.dropout = check_dropout(dropout)
        modules = list(self._modules_of(cell, input_size, hidden_size))
        self.cells = nn.ModuleList(modules)
        _announce(modules)
        self.input_size = modules[0].input_size
        self.hidden_size = modules[0].hidden_size
        self._spec = _spec_of(modules[0])
        for name in ("zoneout", "state_dropout", "weight_dropout"):
            if options.get(name) and isinstance(self._spec, ModuleCell):
                rule = "0 for a user-defined cell"
                raise ArgumentError(name, repr(options[name]), rule, "apply it in the cell's step")
        self._set_options(**options)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _announce(self.cells)

    def _modules_of(self, cell: Any, input_size: int | None, hidden_size: int | None) -> list[Any]:
        """Return the validated modules, one per layer and direction in torch's order."""
        if isinstance(cell, nn.Module):
            for name, value in (("input_size", input_size), ("hidden_size", hidden_size)):
                size = getattr(cell, name, None)
                if value not in (None, size):
                    rule = f"the cell's {name}, {size}"
                    raise ArgumentError(name, repr(value), rule, "leave it out")
            if self.num_layers > 1 or self.bidirectional:
                got = f"a module, with num_layers={self.num_layers} and bidirectional={self.bidirectional}"
                rule = "a class or function for more than one layer or direction"
                raise ArgumentError(
                    "cell", got, rule, "pass the module's class, or a function that returns one"
                )
            return [_checked(cell)]
        if not callable(cell):
            rule = (
                "a module with step(x_t, state), or a function (input_size, hidden_size) -> module"
            )
            raise ArgumentTypeError(
                "cell", f"a {type(cell).__name__}", rule, "pass a module or its class"
            )
        width = check_count("input_size", input_size)
        size = check_count("hidden_size", hidden_size)
        check_signature("cell", cell, "a function (input_size, hidden_size) -> module", width, size)
        modules: list[Any] = []
        for _ in range(self.num_layers):
            layer = [_module_of(cell, width, size) for _ in range(2 if self.bidirectional else 1)]
            modules += layer
            width = len(layer) * _output_size(layer[0])
        kinds = {
            (
                type(module).__name__,
                _output_size(module),
                _spec_of(module).state_sizes(module.hidden_size),
            )
            for module in modules
        }
        if len(kinds) > 1:
            got = "modules with " + " and ".join(sorted(map(repr, kinds)))
            rule = "a function that returns the same class, output_size and state sizes for every layer and direction"
            raise ArgumentError("cell", got, rule, "return modules of one kind")
        return modules

    def reset_parameters(self) -> None:
        """Set learned initial states to zeros; modules of cells initialise their own parameters."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    @property
    def cell(self) -> CellSpec:
        """The cell that the layer runs."""
        return self._spec

    def _settings(self) -> tuple[Any, ...]:
        # The first cell may have been replaced by another module.
        return (*_settings_of(self), self._has_own_initial())

    @property
    def output_size(self) -> int:
        """The number of features of the output."""
        if isinstance(self._spec, ModuleCell):
            return (2 if self.bidirectional else 1) * self._spec.output_size
        return super().output_size

    def final(self, out: Any, state: State) -> Tensor:
        """Return one vector per sequence: the last element's output, and in reverse the first's.

        Args:
            out: the layer's output: a Ragged, a PackedSequence, or one sequence.
            state: the layer's final state.

        Returns:
            ``(B, directions * size)``, zeros for an empty sequence; ``(directions * size,)`` for a
            sequence without a batch. For torch's cells it is :meth:`RecurrentLayer.final`.

        Raises:
            ArgumentTypeError: ``out`` is not an output, or a padded tensor, which has no lengths.
        """
        if self._spec.output_is_state:
            return super().final(out, state)
        if not (
            isinstance(out, Ragged | PackedSequence) or (isinstance(out, Tensor) and out.dim() == 2)
        ):
            got = "a padded tensor" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            rule = "an output with lengths, because this cell's output is not its state"
            raise ArgumentTypeError(
                "out", got, rule, "call the layer with a Ragged, without return_output=False"
            )
        inputs = read(out, None, self.batch_first)
        batch, _ = inputs.flattened()
        vectors = batch.last()
        if self.bidirectional:
            size = vectors.shape[1] // 2
            vectors = torch.cat([vectors[:, :size], batch.first()[:, size:]], 1)
        return vectors if inputs.is_batched else vectors.squeeze(0)

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        defaults = {"num_layers": 1, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        chosen = [
            f"{name}={getattr(self, name)}"
            for name, value in defaults.items()
            if getattr(self, name) != value
        ]
        return ", ".join(filter(None, (*chosen, super().extra_repr())))

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The size of each state."""
        return self._spec.state_sizes(self.hidden_size)

    def _weights(self) -> tuple[Any, ...]:
        """Return the modules if they are user-defined, or the weights of torch's cells."""
        for module in self.cells:
            for hook in module._forward_pre_hooks.values():
                # A weight that torch's pruning or weight_norm computes before a call, which a cell
                # does not have.
                if type(hook).__module__.startswith("torch.nn.utils."):
                    hook(module, ())
        if isinstance(self._spec, ModuleCell):
            return tuple(self.cells)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return tuple([Weights(*(getattr(module, name) for name in names)) for module in self.cells])

    def _like(self, weights: tuple[Any, ...]) -> Tensor | None:
        return (
            next(self.cells.parameters(), None)
            if isinstance(self._spec, ModuleCell)
            else weights[0].input
        )

    def _has_own_initial(self) -> bool:
        return self.initial_state != "zeros" or hasattr(self.cells[0], "initial_state")

    def _own_initial(self, batch: Ragged) -> Any:
        if self.initial_state != "zeros":
            return super()._own_initial(batch)
        states = [_states_of(module, batch._count) for module in self.cells]
        return one_or_tuple(tuple(map(torch.stack, zip(*states, strict=True))))


_settings_of = settings_of("_spec")

_TORCH_CELLS: dict[type[nn.Module], Callable[[Any], str]] = {
    nn.RNNCell: lambda module: f"rnn_{module.nonlinearity}",
    nn.LSTMCell: lambda module: "lstm",  # noqa: ARG005
    nn.GRUCell: lambda module: "gru",  # noqa: ARG005
}


# The methods of a cell, with their parameters.
_METHODS = (
    ("step", "x_t", "state"),
    ("initial_state", "batch_size"),
    ("prepare", "values", "offsets"),
)


def _announce(modules: Iterable[nn.Module]) -> None:
    """Make modules available to graphs."""
    from raglane.kernels.program import modules as graphs

    graphs.announce(modules)


def _spec_of(module: Any) -> CellSpec:
    """Return the cell of a module; torch's own cells have faster kernels."""
    if type(module) in _TORCH_CELLS:
        return CELLS[_TORCH_CELLS[type(module)](module)]
    sizes: tuple[int, ...] = (module.hidden_size,)
    is_tuple = False
    if isinstance(module, nn.LSTMCell):
        sizes = (module.hidden_size,) * 2
        is_tuple = True
    elif hasattr(module, "initial_state"):
        with torch.no_grad():
            initial = module.initial_state(1)
        sizes = tuple(state.shape[1] for state in _states_of(module, 1))
        is_tuple = not isinstance(initial, Tensor)
    kind = getattr(module, "cell_type", ModuleCell)
    return kind(module, output_size=_output_size(module), state_sizes=sizes, is_tuple=is_tuple)


def _output_size(module: Any) -> int:
    return getattr(module, "output_size", module.hidden_size)


def _states_of(module: Any, count: int) -> tuple[Tensor, ...]:
    """Return a module's initial states for ``count`` sequences as a tuple."""
    initial = module.initial_state(count)
    states = (initial,) if isinstance(initial, Tensor) else initial
    if not isinstance(states, tuple | list):
        states = ()
    has_rows = all(isinstance(state, Tensor) and state.shape[:-1] == (count,) for state in states)
    if not states or not has_rows:
        shapes = [f"shape {tuple(state.shape)}" for state in states if isinstance(state, Tensor)]
        got = " and ".join(shapes) or f"a {type(initial).__name__}"
        name = f"{type(module).__name__}.initial_state({count})"
        rule = f"a tensor ({count}, size), or a tuple of them"
        raise ArgumentTypeError(name, got, rule, "return one row per sequence")
    return tuple(states)


def _module_of(factory: Callable[[int, int], Any], input_size: int, hidden_size: int) -> Any:
    """Return the factory's module, with the sizes checked."""
    module = _checked(factory(input_size, hidden_size))
    for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
        if getattr(module, name) != size:
            got = f"a function that returns a {type(module).__name__} with {name}={getattr(module, name)}"
            rule = f"a function that returns a module of the requested sizes, here {name}={size}"
            raise ArgumentError("cell", got, rule, "pass both arguments on to the module")
    return module


def _check_attributes(module: Any) -> None:
    """Check that a module has sizes and a step."""
    is_cell = isinstance(module, nn.RNNCellBase) or callable(getattr(module, "step", None))
    missing = [
        name
        for name in ("input_size", "hidden_size")
        if not isinstance(getattr(module, name, None), int)
    ]
    if isinstance(module, nn.Module) and is_cell and not missing:
        return
    for name in missing:
        if hasattr(module, name):
            # E.g. the sizes of several states.
            got = quote(getattr(module, name))
            rule = "a whole number; initial_state(batch_size) returns states of other sizes"
            fix = f"set {name} to the size of the output, and add initial_state"
            raise ArgumentTypeError(f"{type(module).__name__}.{name}", got, rule, fix)
    absent = missing if is_cell else ["step(x_t, state)", *missing]
    got = f"a {type(module).__name__} without {', '.join(absent)}"
    rule = "a module with input_size, hidden_size and step(x_t, state) -> (output, state)"
    raise ArgumentTypeError("cell", got, rule, "add the missing attributes")


def _checked(module: Any) -> Any:
    """Return the module if it is a valid cell."""
    if isinstance(module, RecurrentLayer | nn.RNNBase):
        got = f"a {type(module).__name__}"
        fix = "call the layer, without Recurrent"
        raise ArgumentTypeError(
            "cell", got, "a cell, which runs one step; a layer runs whole sequences", fix
        )
    for name in ("prepare", "initial_state"):
        if hasattr(module, name) and not callable(getattr(module, name)):
            got = f"a {type(getattr(module, name)).__name__}"
            raise ArgumentTypeError(
                f"{type(module).__name__}.{name}", got, "a method", "give it another name"
            )
    _check_attributes(module)
    for name in ("input_size", "hidden_size", "output_size"):
        if hasattr(module, name):
            check_count(f"{type(module).__name__}.{name}", getattr(module, name))
    for name, *parameters in _METHODS:
        if hasattr(module, name):
            rule = f"a method {name}({', '.join(parameters)})"
            check_signature(
                f"{type(module).__name__}.{name}", getattr(module, name), rule, *parameters
            )
    return module
