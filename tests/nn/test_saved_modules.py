"""Files of ``torch.save`` load under the paths of modules that they name, also former ones."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

import raglane as rl
from raglane._utils.moved import MOVED

# Each model with an input and its output, as saved when the modules of MOVED had their former paths.
SAVED = Path(__file__).parent / "saved/models.pt"


@pytest.mark.parametrize("name", ["layer", "encoder", "accelerated", "embeddings"])
def test_a_saved_module_computes_what_it_did(name: str) -> None:
    saved = torch.load(SAVED, weights_only=False)[name]
    inputs = saved["input"]
    with torch.no_grad():
        output = saved["model"](rl.Ragged(inputs) if isinstance(inputs, list) else inputs)
    output = output[0] if isinstance(output, tuple) else output
    output = output.values if isinstance(output, rl.Ragged) else output
    torch.testing.assert_close(output, saved["output"])


@pytest.mark.parametrize("former", MOVED)
def test_a_former_path_has_the_names_of_today(former: str) -> None:
    module = import_module(former)
    today = import_module(MOVED[former])
    names = [name for name in vars(today) if not name.startswith("__")]
    assert names
    assert all(getattr(module, name) is getattr(today, name) for name in names)
    assert vars(today)["__name__"] == MOVED[former]
    with pytest.raises(AttributeError):
        _ = module.nothing
