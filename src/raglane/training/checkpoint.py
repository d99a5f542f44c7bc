"""The saved model: one folder of safetensors weights and a JSON configuration, nothing that runs code when read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.errors import CheckpointError, explain, require
from raglane.reading import as_path, read_file
from raglane.training.files import whole_folder
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.stored import damaged, reading

__all__ = [
    "FORMAT_VERSION",
    "SavedModel",
    "load_model",
    "model_files",
    "read_json",
    "read_tensors",
    "to_json",
    "to_safetensors",
]

FORMAT = "raglane-model"
FORMAT_VERSION = 1
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
        """``classify``, ``tag`` or ``forecast``."""
        return self.model.config.task


def to_json(content: Any) -> bytes:
    r"""JSON that a person can read, as the bytes of a file.

    Example:
        >>> to_json({"a": [1, 2]}).decode()
        '{\n  "a": [\n    1,\n    2\n  ]\n}\n'
    """
    # The name of a file need not be UTF-8: what is not is half a surrogate pair here, and an escape of JSON there.
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors of any device as the bytes of a safetensors file.

    Args:
        tensors: by name.

    Example:
        >>> len(to_safetensors({"a": torch.ones(2)})) > 8
        True
    """
    # Clones, since layers on a GPU keep all their weights in one block, which safetensors refuses.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    content: bytes = require("safetensors.torch", "train").save(copies)
    return content


def model_files(model: SequenceModel, preprocessor: Preprocessor, columns: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a saved model, for :func:`~raglane.training.files.write_folder`.

    Args:
        model: on any device.
        preprocessor: what its inputs went through.
        columns: which columns of a file hold what, as they were named for training.

    Returns:
        The bytes of each file by its name.
    """
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": model.config.to_config(),
        "preprocessor": preprocessor.to_config(),
        "columns": dict(columns),
    }
    return {CONFIG: to_json(config), WEIGHTS: to_safetensors(model.state_dict())}


def load_model(path: str | os.PathLike[str]) -> SavedModel:
    """Read a saved model.

    Args:
        path: the folder of a model, or of a run: then its best model.

    Raises:
        ArgumentTypeError: ``path`` is no path.
        CheckpointError: no such folder, no model in it, a file that is damaged, or a newer format.
    """
    folder = _model_folder(as_path(path))
    config = read_json(folder / CONFIG)
    check_format(folder / CONFIG, config, FORMAT, FORMAT_VERSION)
    with reading(folder / CONFIG):
        sizes = ModelConfig.from_config(config["model"])
        preprocessor = Preprocessor.from_config(config["preprocessor"])
        sizes.check_fits(preprocessor)
        model = SequenceModel(sizes)
        columns = dict(config["columns"])
    load_weights(model, folder)
    return SavedModel(model.eval(), preprocessor, columns)


def load_weights(model: SequenceModel, folder: Path) -> None:
    """Put the weights of a saved model into a model of the same sizes.

    Args:
        model: on any device.
        folder: of a saved model.

    Raises:
        CheckpointError: the weights cannot be read or do not fit.
    """
    weights = read_tensors(folder / WEIGHTS)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise damaged(folder / WEIGHTS, str(error).splitlines()[-1].strip()) from error


def check_format(path: Path, config: Mapping[str, Any], name: str, newest: int) -> None:
    """Refuse a file of another kind, or of a format that this version cannot read.

    Args:
        path: the file, for the message.
        config: its content.
        name: what ``config["format"]`` must be.
        newest: the newest ``config["format_version"]`` that this version reads.

    Raises:
        CheckpointError: it is something else, or newer.

    Example:
        >>> check_format(Path("config.json"), {"format": "raglane-model", "format_version": 1}, "raglane-model", 1)
    """
    version = config.get("format_version")
    if config.get("format") != name or not isinstance(version, int):
        raise damaged(path, f"format {config.get('format')!r} where {name!r} is expected")
    if version > newest:
        raise CheckpointError(
            explain(
                str(path),
                f"format version {version}",
                f"this version of Raglane reads up to {newest}",
                "pip install --upgrade raglane",
            )
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, cannot be read or holds no JSON object.
    """
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise damaged(path, _why(error)) from error
    except RecursionError as error:
        raise damaged(path, "brackets in brackets without end") from error
    if not isinstance(content, dict):
        raise damaged(path, "something else than an object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, cut short or something else.
    """
    safetensors = require("safetensors", "train")
    load = require("safetensors.torch", "train").load
    try:
        tensors: dict[str, Tensor] = load(read_file(path))
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise damaged(path, _why(error)) from error
    return tensors


def _why(error: Exception) -> str:
    """What is wrong with a file, without its name."""
    return f"{error.strerror or error}" if isinstance(error, OSError) else f"{error}"


def _model_folder(path: Path) -> Path:
    # Not by the methods of Path, which fail at a name that is too long.
    if not os.path.isdir(path):
        raise CheckpointError(
            explain(
                str(path),
                "a file" if os.path.exists(path) else "no such folder",
                "the folder of a run or of a model",
                "give the folder that raglane train wrote",
            )
        )
    if (path / CONFIG).is_file():
        return path
    folder = whole_folder(path / "best")
    if folder is None:
        raise CheckpointError(
            explain(
                str(path),
                "a folder without a saved model",
                "a run holds its model in the folder best",
                "give the folder that raglane train wrote; a run that was stopped in its first epoch has no model yet",
            )
        )
    return folder


def describe(model: SequenceModel) -> str:
    """The model in a line: cell, sizes and the number of weights.

    Args:
        model: any.

    Example:
        >>> describe(SequenceModel(ModelConfig("classify", "gru", 12, 9)))
        'GRU, 64 units, 1 layer, 15,561 weights'
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    directions = ", bidirectional" if config.bidirectional else ""
    layers = f"{config.layers} layer" + ("" if config.layers == 1 else "s")
    name = config.cell.upper().replace("_", " ") + (" with layer normalisation" if config.layer_norm else "")
    return f"{name}, {config.hidden} units, {layers}{directions}, {weights:,} weights"
