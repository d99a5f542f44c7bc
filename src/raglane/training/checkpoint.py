"""The saved model: one folder of safetensors weights and a JSON configuration, nothing that runs code when read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane._utils.files import as_path
from raglane._utils.memory import FLOAT, TENSOR, check_memory
from raglane._utils.messages import message, require
from raglane.data.preprocess import Preprocessor
from raglane.errors import CheckpointError
from raglane.training.folder import BEST, find
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.own_cell import check_named, is_own, label_of, name_cell
from raglane.training.stored import damaged, parse_json, read_bytes, read_json, reading, to_json

FORMAT = "raglane-model"
FORMAT_VERSION = 2
CONFIG, WEIGHTS = "config.json", "weights.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """A model with what turns data into its inputs and its outputs into answers.

    Args:
        model: in evaluation mode, on the CPU.
        preprocessor: vocabulary, scaling and labels, learned on the training part.
        columns: which columns of a file hold what, as they were named for training.
    """

    model: SequenceModel
    preprocessor: Preprocessor
    columns: dict[str, Any]

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.model.config.task


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors of any device as the bytes of a safetensors file."""
    # Clones, since layers on a GPU keep all their weights in one block, which safetensors refuses.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    content: bytes = require("safetensors.torch", "train").save(copies)
    return content


def model_files(model: SequenceModel, preprocessor: Preprocessor, columns: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a saved model, for :func:`~raglane._utils.files.write_folder`."""
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": model.config.to_config(),
        "preprocessor": preprocessor.to_config(),
        "columns": dict(columns),
    }
    return {CONFIG: to_json(config), WEIGHTS: to_safetensors(model.state_dict())}


def load_model(path: str | os.PathLike[str], cell: str | type | None = None) -> SavedModel:
    """Read a saved model.

    Args:
        path: the folder of a model, or of a run: then its best model.
        cell: the user's own cell, ``"path/to/file.py:MyCell"`` or a class; None takes one that was named in
            this process before.

    Raises:
        ArgumentError: the file of the cell cannot be read.
        ArgumentTypeError: ``path`` is not a path, or ``cell`` no cell.
        CheckpointError: no such folder, no model in it, a file that is damaged, or a newer format.
    """
    folder = model_folder(as_path(path))
    choice = None if cell is None else name_cell(cell)
    return _made(read_json(folder / CONFIG), lambda: read_tensors(folder / WEIGHTS), folder, choice)


def count_weights(path: str | os.PathLike[str]) -> int:
    """The number of weights of a saved model, read without its code."""
    folder = model_folder(as_path(path))
    sizes = _sizes(read_json(folder / CONFIG), folder)
    weights = read_tensors(folder / WEIGHTS)
    found = sum(tensor.numel() for tensor in weights.values())
    if is_own(sizes.cell):
        return found
    with reading(folder / CONFIG):
        wanted = sizes.count()[0]
    if found < wanted:
        raise damaged(folder / WEIGHTS, f"fewer than the {wanted:,} weights that {CONFIG} describes")
    return wanted


def read_model(files: Mapping[str, bytes], folder: Path) -> SavedModel:
    """A model from the bytes of its files, as :func:`model_files` gives them."""
    absent = next((name for name in (CONFIG, WEIGHTS) if name not in files), None)
    if absent is not None:
        raise damaged(folder / absent, "no such file")
    config = parse_json(files[CONFIG], folder / CONFIG)
    return _made(config, lambda: parse_tensors(files[WEIGHTS], folder / WEIGHTS), folder)


def _sizes(config: Mapping[str, Any], folder: Path) -> ModelConfig:
    check_format(folder / CONFIG, config, FORMAT, FORMAT_VERSION)
    with reading(folder / CONFIG):
        return ModelConfig.from_config(config["model"])


def _made(
    config: dict[str, Any], read_weights: Callable[[], dict[str, Tensor]], folder: Path, cell: str | None = None
) -> SavedModel:
    """The model of a configuration, with the weights that are read once it is known how many there should be."""
    sizes = _sizes(config, folder)
    # Outside of reading, whose messages are about the file.
    check_named(sizes.cell, cell)
    with reading(folder / CONFIG):
        preprocessor = Preprocessor.from_config(config["preprocessor"])
        sizes.check_fits(preprocessor)
        weights, tensors = sizes.count()
        # Three times: in the file, as read from it, and in the model.
        check_memory(f"a model of {weights:,} weights", 3 * FLOAT * weights + TENSOR * tensors, "give another model")
        columns = dict(config["columns"])
    stored = read_weights()
    # Before the model is built, which takes long where a damaged configuration asks for a million layers.
    found = sum(tensor.numel() for tensor in stored.values())
    if found < weights or len(stored) < tensors:
        got = f"{found:,} weights in {len(stored):,} tensors where {CONFIG} asks for {weights:,} in {tensors:,}"
        raise damaged(folder / WEIGHTS, got)
    # The weights that a new model draws are not those that it gets: the caller's random numbers stay as they were.
    with reading(folder / CONFIG), torch.random.fork_rng(devices=[]):
        model = SequenceModel(sizes)
    load_weights(model, stored, folder / WEIGHTS)
    return SavedModel(model.eval(), preprocessor, columns)


def load_weights(model: SequenceModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put weights into a model that they are for: not others, nor of another shape or dtype, nor not finite."""
    wanted = model.state_dict()
    for name in [*(name for name in wanted if name not in tensors), *(name for name in tensors if name not in wanted)]:
        raise damaged(path, f"{'no' if name in wanted else 'an unknown'} tensor {name!r}")
    for name, like in wanted.items():
        tensor = tensors[name]
        for what, value, expected in (
            ("shape", tuple(tensor.shape), tuple(like.shape)),
            ("dtype", tensor.dtype, like.dtype),
        ):
            if value != expected:
                raise damaged(path, f"{name} of {what} {value} where {expected} is expected")
        if not tensor.isfinite().all():
            raise damaged(path, f"{name} with numbers that are not finite")
    model.load_state_dict(tensors)


def check_format(path: Path, config: Mapping[str, Any], name: str, newest: int) -> None:
    """Refuse a file of another kind, or of a format that this version cannot read."""
    version = config.get("format_version")
    if config.get("format") != name or not isinstance(version, int):
        raise damaged(path, f"format {config.get('format')!r} where {name!r} is expected")
    if version > newest:
        rule = f"of format version {newest} or earlier, for this version of Raglane"
        raise CheckpointError(
            message(str(path), f"format version {version}", rule, "run pip install --upgrade raglane")
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    # Twice: as it is in the file, and as tensors.
    return parse_tensors(read_bytes(path, 2), path)


def parse_tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors that the bytes of a safetensors file hold, on the CPU."""
    safetensors = require("safetensors", "train")
    load = require("safetensors.torch", "train").load
    try:
        tensors: dict[str, Tensor] = load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise damaged(path, f"{error}") from error
    return tensors


def model_folder(path: Path) -> Path:
    """The folder of a saved model."""
    # Not by the methods of Path, which fail at a name that is too long.
    if not os.path.isdir(path):
        got, fix = "a file" if os.path.exists(path) else "no such folder", "pass the folder that raglane train wrote"
        raise CheckpointError(message(str(path), got, "the folder of a run or of a model", fix))
    if (path / CONFIG).is_file():
        return path
    folder = find(path, BEST)
    if not folder.is_dir():
        rule = "the folder of a run, with a model in the subfolder best"
        fix = "pass the folder that raglane train wrote; a run that was stopped in its first epoch has no model yet"
        raise CheckpointError(message(str(path), "a folder without a saved model", rule, fix))
    return folder


def describe(model: SequenceModel) -> str:
    """The model in a line: layer, sizes and the number of weights."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    directions = ", bidirectional" if config.bidirectional else ""
    layers = f"{config.num_layers} layer" + ("" if config.num_layers == 1 else "s")
    name = label_of(config.cell) if is_own(config.cell) else config.cell.upper().replace("_", " ")
    name += " with layer normalisation" if config.layer_norm else ""
    return f"{name}, {config.hidden_size} units, {layers}{directions}, {weights:,} weights"
