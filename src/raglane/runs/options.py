"""The keyword arguments of ``rl.fit`` and of the methods of a run, to type checkers.

They are the options of :class:`~raglane.training.settings.Settings`,
:class:`~raglane.data.Columns` and :class:`~raglane.runs.sources.SequenceSource`, which have their defaults,
rules and help texts.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class ColumnOptions(TypedDict, total=False):
    """The columns of data."""

    sequence: str | None
    label: str | None
    id: str | None
    time: str | None
    time_format: str | None
    duplicate_times: Literal["keep", "mean", "first"] | None
    features: str | list[str] | tuple[str, ...] | None
    static: str | list[str] | tuple[str, ...] | None
    categorical: str | list[str] | tuple[str, ...] | None
    split: str | None
    label_split: str | None
    tokens: Literal["yes", "no"] | bool | None
    wide: bool
    time_gaps: bool
    keep_trailing: bool
    header: str | None
    no_header: bool
    label_from_name: str | None
    on_bad_row: Literal["raise", "skip"]


class FitOptions(ColumnOptions, total=False):
    """The settings of a training, and the columns."""

    task: Literal["classify", "tag", "regress", "multilabel", "forecast", "language", "transcribe"]
    cell: str
    hidden_size: int
    num_layers: int
    bidirectional: bool
    layer_norm: bool
    initial_state: Literal["zeros", "learned", "lengths"]
    pooling: Literal["final", "last", "first", "mean", "max", "logsumexp", "attention"]
    dropout: float
    input_dropout: float
    state_dropout: float
    weight_dropout: float
    zoneout: float
    embedding_dropout: float
    tie_weights: bool
    loss: Literal["cross_entropy", "mse", "mae", "huber", "quantile", "bce", "likelihood"] | None
    quantile: list[float] | tuple[float, ...] | None
    season: int | None
    decoder: Literal["ctc", "transducer", "attention"] | None
    embedding: int
    epochs: int | None
    batch_size: int | Literal["auto"]
    batch_elements: int | Literal["auto"] | None
    too_long: Literal["raise", "drop", "chunk", "alone"]
    accumulate: int
    lr: float
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"]
    weight_decay: float
    grad_clip: float | None
    lr_schedule: Literal["constant", "cosine", "plateau"] | None
    warmup: int
    class_weights: Literal["none", "balanced"]
    label_smoothing: float
    activation_penalty: float
    temporal_penalty: float
    unk_dropout: float
    bptt_steps: int | None
    patience: int | None
    bucket: bool
    largest_first: bool
    seed: int
    validation_fraction: float
    missing: Literal["raise", "zero", "forward", "elapsed"]
    checkpoint_minutes: float
    device: Literal["auto", "cpu", "cuda"]
    processes: int
    engine: Literal["processes", "ray"]
    threads: int | None
    workers: int
    logger: Literal["tensorboard", "wandb", "mlflow"] | None
