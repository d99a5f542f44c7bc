"""Stored models: a folder of safetensors weights and a JSON configuration. Reading one runs no
code.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane._utils.files import as_path
from raglane._utils.json import (
    damaged,
    parse_json,
    read_bytes,
    read_json,
    reading,
    to_json,
)
from raglane._utils.memory import FLOAT, TENSOR, check_memory
from raglane._utils.messages import count_of, require
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import CheckpointError
from raglane.training.folder import BEST, find
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.own_cell import check_named, is_own, label_of, name_cell
from raglane.training.stored import with_new_words

FORMAT = "raglane-model"
FORMAT_VERSION = 3
CONFIG = "config.json"
WEIGHTS = "weights.safetensors"
# The name of the checksum in the metadata of a safetensors file.
_CHECKSUM = "crc32"


@dataclass(frozen=True)
class SavedModel:
    """A model in evaluation mode on the CPU, its preprocessing, and the column names of its
    training data.
    """

    model: SequenceModel
    preprocessor: Preprocessor
    columns: dict[str, Any]
    # The version of Raglane that wrote the model; None for one in memory.
    written_by: str | None = None

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.model.config.task


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors of any device as the bytes of a safetensors file with a checksum."""
    # Cloned, because on a GPU the weights of a layer share one storage, which safetensors does not
    # support.
    contiguous = torch.contiguous_format
    copies = {
        name: tensor.detach().cpu().clone(memory_format=contiguous)
        for name, tensor in tensors.items()
    }
    save = require("safetensors.torch", "train").save
    return save(copies, {_CHECKSUM: _checksum(save(copies))[1]})


def _checksum(content: bytes) -> tuple[str | None, str]:
    """Return the stored and the actual CRC-32 of the numbers of a safetensors file, which follow a
    JSON header.
    """
    begin = 8 + int.from_bytes(content[:8], "little")
    stored = (json.loads(content[8:begin]).get("__metadata__") or {}).get(
        _CHECKSUM
    )  # null is permitted
    return stored, f"{zlib.crc32(memoryview(content)[begin:]):08x}"


def model_files(
    model: SequenceModel, preprocessor: Preprocessor, columns: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the files of a stored model, for :func:`~raglane._utils.files.write_folder`."""
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "raglane": own_version(),
        "model": model.config.to_config(),
        "preprocessor": preprocessor.to_config(),
        "columns": dict(columns),
    }
    return {CONFIG: to_json(config), WEIGHTS: to_safetensors(model.state_dict())}


def load_model(path: str | os.PathLike[str], cell: str | type | None = None) -> SavedModel:
    """Read the model in a folder, or the best model of a run; ``cell`` is its user-defined cell, if
    it has one.
    """
    folder = model_folder(as_path(path))
    choice = None if cell is None else name_cell(cell)
    config = read_json(folder / CONFIG)
    with _naming_version(config):
        return _made(config, lambda: read_tensors(folder / WEIGHTS), folder, choice)


def own_version() -> str:
    """Return the version of Raglane."""
    try:
        return version("raglane")
    except PackageNotFoundError:  # a copy of the source
        return "unknown"


def _written_by(config: Mapping[str, Any]) -> str:
    """Return the version of Raglane in a configuration; older formats have none."""
    written = config.get("raglane")
    return written if isinstance(written, str) else f"with format {config.get('format_version')}"


@contextmanager
def _naming_version(config: Mapping[str, Any]) -> Iterator[None]:
    """Add the version that wrote a model to errors, if it is another one."""
    try:
        yield
    except CheckpointError as error:
        written = _written_by(config)
        if config.get("format") != FORMAT or written == own_version():
            raise
        versions = f"It was written by Raglane {written}; this is {own_version()}."
        raise CheckpointError(f"{error} {versions}") from error


def count_weights(path: str | os.PathLike[str]) -> int:
    """Return the number of weights of a stored model, without the code of a user-defined cell."""
    folder = model_folder(as_path(path))
    sizes = _sizes(read_json(folder / CONFIG), folder)
    weights = read_tensors(folder / WEIGHTS)
    stored_count = sum(tensor.numel() for tensor in weights.values())
    if is_own(sizes.cell):
        return stored_count
    with reading(folder / CONFIG):
        model_count = sizes.count()[0]
    if stored_count < model_count:
        raise damaged(
            folder / WEIGHTS, f"fewer than the {model_count:,} weights that {CONFIG} describes"
        )
    return model_count


def stored_labels(path: str | os.PathLike[str]) -> list[str]:
    """Return the classes or labels of a stored model, without its weights."""
    folder = model_folder(as_path(path))
    config = read_json(folder / CONFIG)
    check_format(folder / CONFIG, config, FORMAT, FORMAT_VERSION)
    with reading(folder / CONFIG):
        return list(config["preprocessor"]["labels"] or ())


def read_model(files: Mapping[str, bytes], folder: Path) -> SavedModel:
    """Return the model of the files that :func:`model_files` returned."""
    absent = next((name for name in (CONFIG, WEIGHTS) if name not in files), None)
    if absent is not None:
        raise damaged(folder / absent, "no such file")
    config = parse_json(files[CONFIG], folder / CONFIG)
    return _made(config, lambda: parse_tensors(files[WEIGHTS], folder / WEIGHTS), folder)


def _sizes(config: Mapping[str, Any], folder: Path) -> ModelConfig:
    check_format(folder / CONFIG, config, FORMAT, FORMAT_VERSION)
    with reading(folder / CONFIG):
        return ModelConfig.from_config(with_new_words(dict(config))["model"])


def _made(
    config: dict[str, Any],
    read_weights: Callable[[], dict[str, Tensor]],
    folder: Path,
    cell: str | None = None,
) -> SavedModel:
    """Return the model of a configuration; its weights are read after the configuration is
    checked.
    """
    sizes = _sizes(config, folder)
    # Outside of `reading`, whose messages are about the file.
    check_named(sizes.cell, cell)
    config = with_new_words(config)
    with reading(folder / CONFIG):
        preprocessor = Preprocessor.from_config(config["preprocessor"])
        sizes.check_fits(preprocessor)
        weights, tensors = sizes.count()
        # Memory for three copies: the bytes of the file, its tensors, and the model.
        check_memory(
            f"a model of {weights:,} weights",
            3 * FLOAT * weights + TENSOR * tensors,
            "use a smaller model",
        )
        columns = dict(config["columns"])
    stored = read_weights()
    # Checked before the model is built: a damaged configuration may describe a million layers.
    stored_count = sum(tensor.numel() for tensor in stored.values())
    if stored_count < weights or len(stored) < tensors:
        got = f"{stored_count:,} weights in {len(stored):,} tensors where {CONFIG} describes {weights:,} in {tensors:,}"
        raise damaged(folder / WEIGHTS, got)
    # The random initial weights are overwritten, so the state of the generator is restored.
    with reading(folder / CONFIG), torch.random.fork_rng(devices=[]):
        model = SequenceModel(sizes)
    load_weights(model, stored, folder / WEIGHTS)
    return SavedModel(model.eval(), preprocessor, columns, _written_by(config))


def load_weights(model: SequenceModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into a model; raise unless names, shapes and dtypes agree, and all are
    finite.
    """
    expected = model.state_dict()
    for name in [
        *(name for name in expected if name not in tensors),
        *(name for name in tensors if name not in expected),
    ]:
        raise damaged(path, f"{'no' if name in expected else 'an unknown'} tensor {name!r}")
    for name, like in expected.items():
        tensor = tensors[name]
        if tensor.shape != like.shape:
            raise damaged(
                path, f"{name} of shape {tuple(tensor.shape)} where {tuple(like.shape)} is expected"
            )
        if tensor.dtype != like.dtype:
            raise damaged(path, f"{name} of dtype {tensor.dtype} where {like.dtype} is expected")
        if not tensor.isfinite().all():
            raise damaged(path, f"{name} with numbers that are not finite")
    model.load_state_dict(tensors)


def check_format(path: Path, config: Mapping[str, Any], name: str, newest: int) -> None:
    """Raise if a file has another format, or a newer version of it."""
    number = config.get("format_version")
    if config.get("format") != name or not isinstance(number, int):
        raise damaged(path, f"format {config.get('format')!r} where {name!r} is expected")
    if number > newest:
        rule = f"at most {newest} for this version of Raglane"
        raise CheckpointError(
            str(path), f"format version {number}", rule, "pip install --upgrade raglane"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU."""
    # Memory for two copies: bytes and tensors.
    return parse_tensors(read_bytes(path, 2), path)


def parse_tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors of the bytes of a safetensors file, on the CPU."""
    safetensors = require("safetensors", "train")
    load = require("safetensors.torch", "train").load
    try:
        tensors: dict[str, Tensor] = load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise damaged(path, f"{error}") from error
    stored, actual = _checksum(content)
    if stored not in (None, actual):  # files of other programs have none
        raise damaged(path, "other numbers than were written")
    return tensors


def model_folder(path: Path) -> Path:
    """Return the folder of a stored model: the path itself, or ``best`` of a run."""
    # os.path, because methods of Path raise for names that are too long.
    if not os.path.isdir(path):
        got = "a file" if os.path.exists(path) else "no such folder"
        fix = "pass the folder that raglane train wrote"
        raise CheckpointError(str(path), got, "the folder of a run or of a model", fix)
    if (path / CONFIG).is_file():
        return path
    folder = find(path, BEST)
    if not folder.is_dir():
        rule = "a folder with a model, or a run with its model in best"
        fix = "pass the folder that raglane train wrote; a run that was stopped in its first epoch has no model"
        raise CheckpointError(str(path), "a folder without a saved model", rule, fix)
    return folder


def describe(model: SequenceModel) -> str:
    """Return a line about the model: layer, sizes and number of weights."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers = count_of(config.num_layers, "layer") + (
        ", bidirectional" if config.bidirectional else ""
    )
    name = label_of(config.cell) if is_own(config.cell) else config.cell.upper().replace("_", " ")
    name += " with layer normalisation" if config.layer_norm else ""
    return f"{name}, {config.hidden_size} units, {layers}, {weights:,} weights"
