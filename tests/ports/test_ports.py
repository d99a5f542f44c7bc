"""Twelve classic programs, in plain torch and ragged: the same losses, results and gradients."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

PROGRAMS = """tagger chain names pooling translator siamese characters speech autoencoder policy
forecast documents""".split()

# What a ragged program does without.
_LEFT_OUT = ("values", "offsets", "from_flat")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_both_programs_are_equal(name: str, seed: int) -> None:
    program: Any = import_module(f"ports.{name}")
    renamed = getattr(program, "RENAMED", {})
    torch.manual_seed(seed)
    given = program.sample()
    plain, ragged = program.Plain().double(), program.Ragged().double()
    weights = dict(plain.named_parameters())
    for parameter in weights.values():
        torch.nn.init.uniform_(parameter, -0.7, 0.7)
    ragged.load_state_dict(
        {key: weights[renamed.get(key, key)].detach() for key in ragged.state_dict()}
    )
    loss, result = plain(*given)
    own_loss, own_result = ragged(*given)
    torch.testing.assert_close(own_loss, loss, rtol=0, atol=1e-9)
    if isinstance(result, Tensor):
        torch.testing.assert_close(own_result, result, rtol=0, atol=1e-9)
    else:
        assert own_result == result
    loss.backward()
    own_loss.backward()
    used = set()
    for key, parameter in ragged.named_parameters():
        used.add(renamed.get(key, key))
        expected = weights[renamed.get(key, key)].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-9)
    assert used == weights.keys()


def _classes(name: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(import_module(f"ports.{name}")))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _statements(node: ast.ClassDef) -> int:
    return sum(isinstance(part, ast.stmt) for part in ast.walk(node))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ragged_program_is_the_shorter_one(name: str) -> None:
    classes = _classes(name)
    assert _statements(classes["Ragged"]) <= _statements(classes["Plain"])
    assert not [part for part in ast.walk(classes["Plain"]) if getattr(part, "id", "") == "rl"]
    names = {part.attr for part in ast.walk(classes["Ragged"]) if isinstance(part, ast.Attribute)}
    names |= {part.id for part in ast.walk(classes["Ragged"]) if isinstance(part, ast.Name)}
    assert not names & set(_LEFT_OUT)
    assert not [each for each in names if "pad" in each or "pack" in each]
