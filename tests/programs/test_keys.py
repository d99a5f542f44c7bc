"""Keys that are valid in other processes: equal for the same step, and different for different
steps.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raglane.programs import keys
from raglane.programs.graph import Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.step import Survey

SOURCE = """
import math, torch
from torch import nn
import torch.nn.functional as F

FACTOR = 0.5
TABLE = {"one": [1, 2.0], "set": {3, 4}}

def helper(a, low=-1.0, *, high=1.0):
    return a.clamp(low, high) * inner(a) + counted(1, 2)

def counted(*parts):
    return len(parts)

def inner(a):
    return a * FACTOR + TABLE["one"][0]

def made(number):
    def of(a):
        return a + number
    return of

shifted = made(3.0)

class Base(nn.Module):
    power = 2
    def start(self, x):
        return self.linear(x) ** self.power
    def forward(self, x):
        return self.start(x)
    @property
    def slope(self):
        return 0.25
    @staticmethod
    def turned(a):
        return -a

class Options:
    slope = 0.5

def print(*_):
    pass

class Norm(nn.Module):
    def forward(self, a):
        return F.layer_norm(a, (4,)) * math.pi

class Conv(nn.Conv1d):
    def _conv_forward(self, input, weight, bias):
        return input * 1.5

class Own(Base):
    def __init__(self, scale=0.5):
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(9, 4), Norm(), scale
        self.notes = {"a": [1, (2, None)]}
        self.conv = Conv(4, 4, 1)
        print("not a part of a step", Options())
    def step(self, x_t, state):
        def local(a):
            return a * 2.0
        state = self.norm(local(self(torch.cat([x_t, state], 1)))) + shifted(helper(state)) * self.slope
        return super().turned(state), state
    def unread(self):
        return open("/dev/null")
"""
OTHERS = {
    "a function that it calls": ("* inner(a)", "+ inner(a)"),
    "a default": ("low=-1.0", "low=-2.0"),
    "a default by name": ("high=1.0", "high=1.5"),
    "a number around a function": ("FACTOR = 0.5", "FACTOR = 0.25"),
    "a table": ("[1, 2.0]", "[2, 2.0]"),
    "a closure": ("made(3.0)", "made(4.0)"),
    "an attribute of a base": ("power = 2", "power = 3"),
    "a method of a base": ("self.linear(x) **", "-self.linear(x) **"),
    "a property": ("return 0.25", "return 0.5"),
    "a static method": ("return -a", "return a"),
    "what torch calls of a class": ("input * 1.5", "input * 1.25"),
    "what torch calls": ("return self.start(x)", "return self.start(2 * x)"),
    "flags of a function alone": ("*parts", "**parts"),
    "an inner module": ("math.pi", "math.e"),
    "an attribute": ("scale=0.5", "scale=0.75"),
    "a sign of zero": ("FACTOR = 0.5", "FACTOR = -0.0"),
}


def own(source: str = SOURCE, **space: Any) -> Any:
    """Return the class ``Own`` of a source."""
    names: dict[str, Any] = {"__name__": "somebody", **space}
    exec(compile(source, "somewhere", "exec", dont_inherit=True), names)
    return names["Own"]


def key_of(module: nn.Module) -> str:
    return lasting_key(Survey.of(module).key)


def test_every_change_of_a_step_changes_its_key() -> None:
    found = {"nothing": key_of(own()())}
    assert key_of(own()()) == found["nothing"]
    for old, new in (
        ("return a * 2.0", "return a * 2.0  # twice"),
        ('open("/dev/null")', 'open("/dev/zero")'),
    ):
        assert key_of(own(SOURCE.replace(old, new))()) == found["nothing"], new
    for name, (old, new) in OTHERS.items():
        assert SOURCE.count(old) >= 1, name
        found[name] = key_of(own(SOURCE.replace(old, new, 1))())
    found["training"] = key_of(own()().eval())
    found["an attribute of the module"] = key_of(own()(0.125))
    module = own()()
    module.notes["a"][0] = 2
    found["within its attributes"] = key_of(module)
    module = own()()
    module.step = module.norm.forward
    found["a method of another module in place of its step"] = key_of(module)
    same = [name for name, key in found.items() if list(found.values()).count(key) > 1]
    assert not same


def test_versions_are_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = own()(), set()
    for place, value in (
        (None, None),
        ("torch.__version__", "0"),
        ("torch.version.git_version", "0"),
        ("sys.version", "0"),
        ("torch.get_default_dtype", lambda: torch.float64),
        ("pathlib.Path.read_bytes", lambda _: b"another source"),
    ):
        with monkeypatch.context() as patch:
            if place is not None:
                patch.setattr(place, value)
            keys._versions.cache_clear()
            seen.add(key_of(module))
    assert len(seen) == 6
    monkeypatch.setattr(keys, "_IMPORTED", 0.0)
    keys._versions.cache_clear()
    with pytest.raises(Unkept, match="changed since it was imported"):
        key_of(module)
    monkeypatch.undo()
    keys._versions.cache_clear()


def test_changed_functions_of_torch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = own()()
    key = key_of(module)
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.functional.layer_norm", lambda a, shape: a * len(shape))
        other = key_of(module)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda linear, x: x @ linear.weight.T)
        assert len({key, other, key_of(module)}) == 3
    assert key_of(module) == key


class Thing:
    size = 4


class Named(dict):  # type: ignore[type-arg]
    size = 4


UNKNOWN = {
    "os, which may read": ("return a * 2.0", "return a * float(os.environ.get('SCALE', 1))"),
    "reads a builtin_function_or_method": ("return a * 2.0", "return a * torch.get_num_threads()"),
    "reads the class Options": ("return a * 2.0", "return a * Options().slope"),
    "calls type": ("return a * 2.0", "return a * type(self)().scale"),
    "makes a set": ("return a * 2.0", "return a * len([*{self.scale, 2.0}])"),
    "reads a Named": ("return a * 2.0", "return a * named.size"),
    "calls getattr": ("self.slope", "getattr(self, 'sl' + 'ope')"),
    "reads __dict__": ("return a * 2.0", "return a * self.__dict__['sca' + 'le']"),
    "calls open": ("return a * 2.0", "return a * len(open('/dev/null').read())"),
    "reads a Thing": ("return a * 2.0", "return a * thing.size"),
    "reads a tensor": ("return a * 2.0", "return a * number"),
    "changes FACTOR": ("return a * 2.0", "global FACTOR; FACTOR = 1; return a"),
    "reads a _lru_cache_wrapper": ("return a * 2.0", "return cached(a)"),
    "numpy, which may read": ("return a * 2.0", "return a * float(np.sqrt(2.0))"),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_unknown_values_have_no_key(reason: str) -> None:
    old, new = UNKNOWN[reason]
    cached = functools.lru_cache(lambda a: a)
    around = {"os": os, "thing": Thing(), "named": Named(), "number": torch.ones(1)}
    made = own(SOURCE.replace(old, new, 1), np=np, cached=cached, **around)()
    with pytest.raises(Unkept) as refused:
        key_of(made)
    assert reason in refused.value.reason


def test_too_much_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def chained(number: int) -> Any:
        inner = math.sin if number == 0 else chained(number - 1)
        return lambda a: inner(a)

    assert lasting_key(chained(20)) == lasting_key(chained(20)) != lasting_key(chained(19))
    with pytest.raises(Unkept, match="one within the other"):
        lasting_key(chained(sys.getrecursionlimit() // 3))
    monkeypatch.setattr(keys, "_MOST", 10)
    with pytest.raises(Unkept, match="more than 10"):
        lasting_key(chained(20))
