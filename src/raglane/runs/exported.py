"""Export of a run as an ONNX file with its preprocessing, and a JSON file with its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raglane import segments
from raglane._utils.files import check_new_file, check_suffix, write_files
from raglane.data.prepare import seasons
from raglane.data.prepare.encoders import END, UNKNOWN
from raglane.data.prepare.missing import BLOCKS
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import TIME_GAP
from raglane.errors import ExportError
from raglane.export.signature import Layout
from raglane.export.to_onnx import Exported, content_of
from raglane.ragged import Ragged
from raglane.training.model import SequenceModel

# The outputs that are not probabilities, by task.
_OUTPUTS = {"regress": "prediction", "forecast": "prediction", "transcribe": "log_probabilities"}


# How a program turns the log-probabilities of a transcription into labels.
_DECODE = (
    "take the largest output of each element, merge equal neighbours, drop 0; k is labels[k - 1]"
)


class RunModule(nn.Module):
    """A trained model with its preprocessing: input and output are in the units of the data."""

    def __init__(self, model: SequenceModel, preprocessor: Preprocessor) -> None:
        super().__init__()
        if preprocessor.features:
            got = f"{len(preprocessor.features)} in columns of their own"
            rule = "of features in one column of numbers or tokens, because others are joined outside the network"
            fix = "preprocess the data outside the file, and export run.model with rl.export.onnx"
            raise ExportError("model", got, rule, fix)
        if model.config.decoder_name not in (None, "ctc"):
            fix = "predict with the run, or train with the decoder ctc"
            got = f"a model with the decoder {model.config.decoder_name}"
            raise ExportError("model", got, "a model with one output per element", fix)
        self.network = model
        self.task = preprocessor.task
        self.missing = preprocessor.missing
        self.season = preprocessor.season
        self.gap_column = (
            preprocessor.channels.index(TIME_GAP) if TIME_GAP in preprocessor.channels else None
        )
        usual = (
            1.0
            if self.gap_column is None or preprocessor.mean is None
            else preprocessor.mean[self.gap_column]
        )
        self.usual_gap = usual if usual > 0 else 1.0
        self.scale_in = _Scale(preprocessor.mean, preprocessor.std)
        mean = preprocessor.target_mean
        std = preprocessor.target_std
        if self.task == "forecast" and not model.is_binary:
            mean = preprocessor.mean or ()
            std = preprocessor.std or ()
        count = len(model.config.quantiles)
        self.scale_out = _Scale(mean * count, std * count)

    def forward(self, batch: Ragged) -> dict[str, Any]:
        """Map channels in the units of the data, or indices of tokens, to probabilities or
        numbers.
        """
        inputs = self._preprocess(batch)
        outputs: Tensor | Ragged
        outputs = (
            self.network.forecast(inputs)[:, 0] if self.task == "forecast" else self.network(inputs)
        )
        name = _OUTPUTS.get(self.task, "probabilities")
        return {
            name: outputs.map(self._postprocess)
            if isinstance(outputs, Ragged)
            else self._postprocess(outputs)
        }

    def _preprocess(self, batch: Ragged) -> Ragged:
        if self.network.encoder.embedding is not None:
            return batch
        values = self.scale_in.apply(batch.values)
        if self.missing != "raise":
            gaps = self._gaps(batch.values)
            values = _filled(values, batch.offsets, self.missing, gaps)
        if self.season:
            channels = values[:, : self.network.channels]
            more = seasons.differences(channels, batch.offsets, self.season)
            values = torch.cat([values, more], dim=1)
        return batch.with_values(values)

    def _gaps(self, values: Tensor) -> Tensor | None:
        """Return the time since the previous element, as :meth:`Preprocessor.scaled` does."""
        if self.gap_column is None:
            return None
        gaps = values[:, self.gap_column].double()
        return torch.where(gaps.isfinite(), gaps, 0.0) / self.usual_gap

    def _postprocess(self, answers: Tensor) -> Tensor:
        """Return probabilities, or numbers in the units of the data."""
        if self.task in ("classify", "tag", "language"):
            return answers.softmax(-1)
        if self.task == "multilabel":
            return answers.sigmoid()
        if self.task == "transcribe":
            return answers.log_softmax(-1)
        # A forecast of binary channels is already a probability, and not scaled.
        return self.scale_out.invert(answers)


class _Scale(nn.Module):
    """Scaling in float64, because subtracting a large mean in float32 would cancel digits."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
        super().__init__()
        self.is_active = bool(mean)
        self.register_buffer("mean", torch.tensor(mean or (), dtype=torch.float64))
        self.register_buffer("std", torch.tensor(std or (), dtype=torch.float64))

    def apply(self, values: Tensor) -> Tensor:  # type: ignore[override]
        return (
            ((values.double() - self.mean) / self.std).to(values.dtype)
            if self.is_active
            else values
        )

    def invert(self, values: Tensor) -> Tensor:
        return (
            (values.double() * self.std + self.mean).to(values.dtype) if self.is_active else values
        )


def _filled(values: Tensor, offsets: Tensor, missing: str, gaps: Tensor | None) -> Tensor:
    """Fill missing values as :func:`raglane.data.prepare.missing.fill_missing`, with operators that ONNX
    has.
    """
    absent = ~values.isfinite()
    total = values.shape[0]
    flags = absent.to(values.dtype)
    if missing == "zero":
        return torch.cat([torch.where(absent, 0.0, values), flags], 1)
    row = torch.arange(total, device=values.device).unsqueeze(1)
    starts = segments.spread(offsets[:-1], offsets, total).unsqueeze(1)
    # ONNX has no cumulative maximum. `rows` lists the rows in which a channel is present, from
    # index 1; the number of them up to an element is the index of the last.
    count = (~absent).to(torch.int64).cumsum(0)
    rows = count.new_zeros(total + 1, values.shape[1])
    rows = rows.scatter(0, torch.where(absent, 0, count), row.expand(-1, values.shape[1]))
    last = torch.where(count > 0, rows.gather(0, count), -1)
    parts = [torch.where(last >= starts, values.gather(0, last.clamp(min=0)), 0.0), flags]
    if missing == "elapsed":
        times = (row.double() if gaps is None else gaps.unsqueeze(1).cumsum(0)).expand(
            -1, values.shape[1]
        )
        before = torch.maximum(segments.shift(last, offsets, 1, fill=-1), starts)
        parts.append((times - times.gather(0, before)).to(values.dtype))
    return torch.cat(parts, 1)


def description_path(path: Path) -> Path:
    """Return the path of the JSON file of an exported run."""
    return path.parent / f"{path.stem}.json"


def export_run(
    model: SequenceModel, preprocessor: Preprocessor, path: Path, *, layout: Layout, verify: bool
) -> Exported:
    """Write the ONNX file and the JSON file."""
    check_suffix("path", path, [".onnx"])
    metadata_path = description_path(path)
    for file in (path, metadata_path):
        check_new_file("path", file)
    module = RunModule(model, preprocessor)
    text = json.dumps(_description(model, preprocessor, layout), ensure_ascii=False, indent=1)
    content, exported = content_of(
        module, path, _example(preprocessor), layout, verify, {"raglane": text}
    )
    write_files({exported.path: content, metadata_path: f"{text}\n".encode()})
    return exported


def _example(preprocessor: Preprocessor) -> Ragged:
    """Return random sequences with the statistics of the training part."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 30, 2, 17]
    if preprocessor.vocabulary is not None:
        values = torch.randint(len(preprocessor.vocabulary), (sum(lengths),), generator=generator)
        return Ragged.from_flat(values, lengths=lengths)
    scale = _Scale(preprocessor.mean, preprocessor.std)
    values = scale.invert(
        torch.randn(sum(lengths), len(preprocessor.channels), generator=generator)
    )
    if preprocessor.missing != "raise":
        values[torch.rand(values.shape, generator=generator) < 0.1] = torch.nan
    return Ragged.from_flat(values, lengths=lengths)


def _description(model: SequenceModel, preprocessor: Preprocessor, layout: str) -> dict[str, Any]:
    """Return the metadata that a program requires to use the file."""
    description: dict[str, Any] = {
        "format": 1,
        "task": preprocessor.task,
        "layout": layout,
        "inputs": ["values", "lengths" if layout == "padded" else "offsets"],
        "output": f"output_{_OUTPUTS.get(preprocessor.task, 'probabilities')}",
        "per_element": bool(model.config.per_element) and preprocessor.task != "forecast",
    }
    if preprocessor.vocabulary is not None:
        description |= {
            "vocabulary": list(preprocessor.vocabulary),
            "unknown": UNKNOWN,
            "split": preprocessor.split,
        }
        if preprocessor.task == "language":
            description["begins_with"] = END
    else:
        missing = preprocessor.missing if BLOCKS[preprocessor.missing] > 1 else None
        description |= {"channels": list(preprocessor.channels), "missing": missing}
    if preprocessor.labels is not None:
        description["labels"] = list(preprocessor.labels)
    if preprocessor.task == "transcribe":
        description |= {"blank": 0, "label_split": preprocessor.label_split, "decode": _DECODE}
    if preprocessor.task == "multilabel":
        description["thresholds"] = model.get_buffer("thresholds").tolist()
    if preprocessor.target_names:
        description["targets"] = list(preprocessor.target_names)
    if len(model.config.quantiles) > 1:
        description["quantiles"] = list(model.config.quantiles)
    return description
