"""A change between two calls of a cell: the second call gives what a plain loop of its step gives.

Changes of the module and of all that its functions contain are part of the key of its program, or
the step has no program. Globals are read when a program is made; the comparison with the module
ends a program of old ones with a warning.
"""

from __future__ import annotations

import operator
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane.kernels.program import backend

pytestmark = pytest.mark.skipif(
    bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels"
)

D, H = 3, 4
Read = Callable[[Any, Tensor], Any]
Change = Callable[[], object]
Case = tuple[nn.Module, Change]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "_warned", set())
    backend._steps.clear()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.hidden_size = D, H
        self.linear = nn.Linear(D, H)


def cell_of(read: Read, **body: Any) -> Any:
    """Return a cell of a class of its own, whose step multiplies the state by what ``read``
    returns.
    """

    def step(module: Any, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * read(module, state) + module.linear(x_t)
        return state, state

    return type("Own", (Cell,), {"step": step, **body})()


def set_on(target: Any, name: str, value: Any) -> Change:
    return lambda: setattr(target, name, value)


def in_closure(variable: Any, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Case:
    return cell_of(lambda *_: read(variable)), lambda: change(variable)


def a_number_in_a_closure() -> Case:
    slope = 0.5

    def change() -> None:
        nonlocal slope
        slope = 0.25

    return cell_of(lambda *_: slope), change


def a_variable_that_gets_a_value() -> Case:
    variable: Any = types.CellType()

    def read(*_: Any) -> float:
        try:
            return variable
        except NameError:
            return 0.5

    closure = (variable,)
    bare = types.FunctionType(read.__code__, globals(), "read", None, closure)
    return cell_of(bare), set_on(variable, "cell_contents", 0.25)


def a_lambda_with_a_list() -> Case:
    slopes, cell = [0.5], cell_of(lambda m, _: m.slope())
    cell.slope = lambda: slopes[0]
    return cell, lambda: slopes.__setitem__(0, 0.25)


def a_lambda_with_an_object() -> Case:
    options, cell = types.SimpleNamespace(slope=0.5), cell_of(lambda m, _: m.slope())
    cell.slope = lambda: options.slope
    return cell, set_on(options, "slope", 0.25)


def a_lambda_with_its_module() -> Case:
    cell = cell_of(lambda m, _: m.slope())
    cell.factor = 0.5
    cell.slope = lambda: cell.factor
    return cell, set_on(cell, "factor", 0.25)


def a_lambda_in_a_dictionary() -> Case:
    slopes, cell = {"a": 0.5}, cell_of(lambda m, _: m.table["slope"]())
    cell.table = {"slope": lambda: slopes["a"]}
    return cell, lambda: slopes.update(a=0.25)


def another_module_in_a_closure() -> Case:
    other: Any = nn.Module()
    other.slope = 0.5
    return cell_of(lambda *_: other.slope), set_on(other, "slope", 0.25)


def a_property(variable: Any, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Case:
    return (
        cell_of(lambda m, _: m.slope, slope=property(lambda _: read(variable))),
        lambda: change(variable),
    )


def a_getattr() -> Case:
    extras = {"slope": 0.5}

    def getattr_(module: Any, name: str) -> Any:
        return extras[name] if name in extras else nn.Module.__getattr__(module, name)

    return cell_of(lambda m, _: m.slope, __getattr__=getattr_), lambda: extras.update(slope=0.25)


def a_getattribute() -> Case:
    extras = {"slope": 0.5}

    def getattribute(module: Any, name: str) -> Any:
        return extras[name] if name in extras else object.__getattribute__(module, name)

    cell = cell_of(lambda m, _: m.slope, __getattribute__=getattribute)
    return cell, lambda: extras.update(slope=0.25)


class Descriptor:
    def __init__(self) -> None:
        self.slope = 0.5

    def __get__(self, *_: Any) -> Any:
        return self.slope


def a_descriptor() -> Case:
    own = Descriptor()
    return cell_of(lambda m, _: m.slope, slope=own), set_on(own, "slope", 0.25)


def a_decorated_method() -> Case:
    slopes = [0.5]

    def scaled(function: Any) -> Any:
        return lambda *given: slopes[0] * function(*given)

    cell = cell_of(lambda m, h: m.slope(h), slope=scaled(lambda *_: 1.0))
    return cell, lambda: slopes.__setitem__(0, 0.25)


def a_static_method() -> Case:
    slopes = [0.5]
    cell = cell_of(lambda m, _: m.slope(), slope=staticmethod(lambda: slopes[0]))
    return cell, lambda: slopes.__setitem__(0, 0.25)


def a_class_method() -> Case:
    cell = cell_of(lambda m, _: m.slope(), slope=classmethod(lambda cls: cls.factor), factor=0.5)
    return cell, set_on(type(cell), "factor", 0.25)


def of_a_parameter(before: Any, after: Any, read: Read) -> Case:
    cell = cell_of(read)
    if before is not None:
        cell.linear.weight.bound = before
    return cell, set_on(cell.linear.weight, "bound", after)


def within_an_attribute_of_a_parameter() -> Case:
    cell = cell_of(lambda m, _: m.linear.weight.bounds[0])
    cell.linear.weight.bounds = [0.5]
    return cell, lambda: cell.linear.weight.bounds.__setitem__(0, 0.25)


def of_a_buffer() -> Case:
    cell = cell_of(lambda m, _: m.order.bound)
    cell.register_buffer("order", torch.zeros(2))
    cell.order.bound = 0.5
    return cell, set_on(cell.order, "bound", 0.25)


def a_tensor_on_a_parameter() -> Case:
    cell = cell_of(lambda m, _: m.linear.weight.mask)
    cell.linear.weight.mask = torch.full((H,), 0.5)
    return cell, lambda: cell.linear.weight.mask.fill_(0.25)


def a_tensor_in_a_closure(read: Callable[[Tensor], Any]) -> Case:
    slope = torch.full((H,), 0.5)
    return cell_of(lambda *_: read(slope)), lambda: slope.fill_(0.25)


def a_flag_of_a_thread() -> Case:
    flags = threading.local()
    flags.slope = 0.5
    return cell_of(lambda *_: flags.slope), set_on(flags, "slope", 0.25)


def a_thread_in_a_closure() -> Case:
    thread: Any = threading.current_thread()
    thread.slope = 0.5
    return cell_of(lambda *_: thread.slope), set_on(thread, "slope", 0.25)


def an_iterator() -> Case:
    slopes = iter([0.5] * 1000)
    return cell_of(lambda *_: operator.length_hint(slopes) / 1000), lambda: next(slopes)


class Called(nn.Module):
    def forward(self, state: Tensor) -> Tensor:
        return 0.5 * torch.ones_like(state)


def the_forward_of_an_inner_module() -> Case:
    cell = cell_of(lambda m, h: m.inner(h))
    cell.inner = type("Inner", (Called,), {})()
    return cell, set_on(type(cell.inner), "forward", lambda _, h: 0.25 * torch.ones_like(h))


def the_call_of_all_modules() -> Case:
    cell = cell_of(lambda m, h: m.inner(h))
    cell.inner = Called()
    before = nn.Module.__call__

    def call(module: nn.Module, *given: Any, **options: Any) -> Any:
        result = before(module, *given, **options)
        return 0.5 * result if isinstance(module, Called) else result

    return cell, set_on(nn.Module, "__call__", call)


def the_forward_of_linear_layers() -> Case:
    before = nn.Linear.forward
    return cell_of(lambda *_: 0.5), set_on(nn.Linear, "forward", lambda *given: -before(*given))


def the_default_dtype() -> Case:
    cell = cell_of(lambda *_: 0.5 if torch.get_default_dtype() is torch.float32 else 0.25)
    return cell, lambda: torch.set_default_dtype(torch.float64)


def attributes(name: str, before: Any, change: Callable[[Any], object], read: Read) -> Case:
    cell = cell_of(read)
    setattr(cell, name, before)
    return cell, lambda: change(cell)


FOLLOWED: dict[str, Callable[[], Case]] = {
    "a number in a closure": a_number_in_a_closure,
    "a variable that gets a value": a_variable_that_gets_a_value,
    "a list in a closure": lambda: in_closure([0.5], lambda v: v[0], lambda v: v.insert(0, 0.25)),
    "a list in a list in a closure": lambda: in_closure(
        [[0.5]], lambda v: v[0][0], lambda v: v[0].insert(0, 0.25)
    ),
    "a dictionary in a closure": lambda: in_closure(
        {"a": 0.5}, lambda v: v["a"], lambda v: v.update(a=0.25)
    ),
    "a set in a closure": lambda: in_closure(
        {1}, lambda v: 0.5 / len(v), lambda v: v.update({2, 3})
    ),
    "an object in a closure": lambda: in_closure(
        types.SimpleNamespace(slope=0.5),
        lambda v: v.slope,
        lambda v: setattr(v, "slope", 0.25),
    ),
    "a class in a closure": lambda: in_closure(
        type("Options", (), {"slope": 0.5}),
        lambda v: v.slope,
        lambda v: setattr(v, "slope", 0.25),
    ),
    "a function in a closure": lambda: in_closure(
        types.FunctionType((lambda: 0.5).__code__, {}),
        lambda v: v(),
        lambda v: setattr(v, "__code__", (lambda: 0.25).__code__),
    ),
    "the defaults of a function in a closure": lambda: in_closure(
        types.FunctionType((lambda a=1: a).__code__, {}, "f", (0.5,)),
        lambda v: v(),
        lambda v: setattr(v, "__defaults__", (0.25,)),
    ),
    "another module in a closure": another_module_in_a_closure,
    "a lambda with a list": a_lambda_with_a_list,
    "a lambda with an object": a_lambda_with_an_object,
    "a lambda with its module": a_lambda_with_its_module,
    "a lambda in a dictionary": a_lambda_in_a_dictionary,
    "a property with a list": lambda: a_property(
        [0.5], lambda v: v[0], lambda v: v.insert(0, 0.25)
    ),
    "a property with an object": lambda: a_property(
        types.SimpleNamespace(slope=0.5), lambda v: v.slope, lambda v: vars(v).update(slope=0.25)
    ),
    "a __getattr__ with a dictionary": a_getattr,
    "a __getattribute__ with a dictionary": a_getattribute,
    "a descriptor": a_descriptor,
    "a decorated method": a_decorated_method,
    "a static method": a_static_method,
    "a class method": a_class_method,
    "an attribute of a parameter": lambda: of_a_parameter(
        0.5, 0.25, lambda m, _: m.linear.weight.bound
    ),
    "a new attribute of a parameter": lambda: of_a_parameter(
        None, 0.25, lambda m, _: getattr(m.linear.weight, "bound", 0.5)
    ),
    "within an attribute of a parameter": within_an_attribute_of_a_parameter,
    "an attribute of a buffer": of_a_buffer,
    "a tensor on a parameter": a_tensor_on_a_parameter,
    "the forward of an inner module": the_forward_of_an_inner_module,
    "the call of all modules": the_call_of_all_modules,
    "the forward of linear layers": the_forward_of_linear_layers,
    "the default dtype": the_default_dtype,
    "a number": lambda: attributes(
        "slope", 0.5, lambda c: setattr(c, "slope", 0.25), lambda m, _: m.slope
    ),
    "a list": lambda: attributes(
        "slopes", [0.5], lambda c: c.slopes.insert(0, 0.25), lambda m, _: m.slopes[0]
    ),
    "training": lambda: attributes(
        "training", True, lambda c: c.eval(), lambda m, _: 0.5 if m.training else 0.25
    ),
}
PLAIN: dict[str, Callable[[], Case]] = {
    "a tensor in a closure": lambda: a_tensor_in_a_closure(lambda v: v),
    "numbers of a tensor in a closure": lambda: a_tensor_in_a_closure(lambda v: v.tolist()[0]),
    "an array of a tensor in a closure": lambda: a_tensor_in_a_closure(lambda v: v.numpy()[0]),
    "a flag of a thread": a_flag_of_a_thread,
    "a thread in a closure": a_thread_in_a_closure,
    "an iterator": an_iterator,
}


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    call, forward = nn.Module.__call__, nn.Linear.forward
    yield
    nn.Module.__call__, nn.Linear.forward = call, forward  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float32)
    LIST[:] = [0.5]


def plain_loop(cell: Any, batch: rl.Ragged) -> Tensor:
    """Run the step of a cell over each sequence by itself."""
    outputs = []
    for sequence in batch:
        state = torch.zeros(1, H, dtype=sequence.dtype)
        for element in sequence:
            output, state = cell.step(element.unsqueeze(0), state)
            outputs.append(output)
    return torch.cat(outputs)


def agrees(layer: Any, batch: rl.Ragged) -> Tensor:
    """Compare a call and its gradients with a plain loop; return the output."""
    cell, results = layer.cells[0], []
    for run in (lambda: layer(batch)[0].values, lambda: plain_loop(cell, batch)):
        output = run()
        results.append([output, *torch.autograd.grad(output.sin().sum(), [*cell.parameters()])])
    torch.testing.assert_close(*results)
    return results[1][0].detach()


@pytest.mark.parametrize("name", [*FOLLOWED, *PLAIN])
def test_the_second_call_is_that_of_the_changed_cell(name: str) -> None:
    cell, change = (FOLLOWED | PLAIN)[name]()
    layer: Any = rl.nn.Recurrent(cell)
    batch = rl.Ragged([torch.randn(5, D), torch.randn(0, D), torch.randn(3, D)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* runs in plain torch, step by step")
        assert rl.explain(layer, batch).backend == ("program" if name in FOLLOWED else "reference")
        before = agrees(layer, batch)
        change()
        assert not torch.allclose(agrees(layer, batch), before)


NUMBER, LIST, TABLE = 0.5, [0.5], {"slope": 0.5}


def function() -> float:
    return 0.5


class Options:
    slope = 0.5


THREAD = threading.local()


def a_global(name: str, value: Any, read: Read) -> Callable[[pytest.MonkeyPatch], Case]:
    return lambda patch: (cell_of(read), lambda: patch.setitem(globals(), name, value))


def an_environment(patch: pytest.MonkeyPatch) -> Case:
    patch.setenv("SLOPE", "0.5")
    cell = cell_of(lambda m, _: m.slope, slope=property(lambda _: float(os.environ["SLOPE"])))
    return cell, lambda: patch.setenv("SLOPE", "0.25")


def a_flag_of_this_thread(patch: pytest.MonkeyPatch) -> Case:
    patch.setattr(THREAD, "slope", 0.5, raising=False)
    return cell_of(lambda *_: THREAD.slope), lambda: patch.setattr(THREAD, "slope", 0.25)


def the_threads_of_torch(patch: pytest.MonkeyPatch) -> Case:
    patch.setattr(torch, "get_num_threads", lambda: 2)
    cell = cell_of(lambda *_: 1 / torch.get_num_threads())
    return cell, lambda: patch.setattr(torch, "get_num_threads", lambda: 4)


READ_ONCE: dict[str, Callable[[pytest.MonkeyPatch], Case]] = {
    "a global number": a_global("NUMBER", 0.25, lambda *_: NUMBER),
    "a global list": lambda _: (cell_of(lambda *_: LIST[0]), lambda: LIST.insert(0, 0.25)),
    "a global dictionary": lambda patch: (
        cell_of(lambda *_: TABLE["slope"]),
        lambda: patch.setitem(TABLE, "slope", 0.25),
    ),
    "a global function": a_global("function", lambda: 0.25, lambda *_: function()),
    "a global class": lambda patch: (
        cell_of(lambda *_: Options.slope),
        lambda: patch.setattr(Options, "slope", 0.25),
    ),
    "the environment": an_environment,
    "a flag of this thread": a_flag_of_this_thread,
    "a setting of torch": the_threads_of_torch,
    "a function of torch": lambda patch: (
        cell_of(lambda _, h: torch.sigmoid(h)),
        lambda: patch.setattr(torch, "sigmoid", lambda h: h.tanh()),
    ),
    "a function of torch.nn": lambda patch: (
        cell_of(lambda _, h: F.softsign(h)),
        lambda: patch.setattr(F, "softsign", lambda h: h.tanh()),
    ),
    "a method of tensors": lambda patch: (
        cell_of(lambda _, h: h.sigmoid()),
        lambda: patch.setattr(Tensor, "sigmoid", Tensor.tanh),
    ),
}


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_change_of_values_that_are_read_once_ends_the_program(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_CALLS", 3)
    cell, change = READ_ONCE[name](monkeypatch)
    layer: Any = rl.nn.Recurrent(cell)
    batch = rl.Ragged([torch.randn(5, D), torch.randn(0, D), torch.randn(3, D)])
    assert rl.explain(layer, batch).backend == "program"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = agrees(layer, batch)
        for _ in range(2):
            agrees(layer, batch)
    change()
    with pytest.warns(
        UserWarning, match="runs in plain torch from now on: the (values|gradients) .* differ"
    ):
        after = agrees(layer, batch)
    assert not torch.allclose(after, before)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* runs in plain torch, step by step")
        agrees(layer, batch)
