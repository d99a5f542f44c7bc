"""What the choices of a run are called: the names of tasks, losses, layers and the like, each list once."""

from __future__ import annotations

TASKS = ("classify", "tag", "regress", "multilabel", "forecast", "language")
# Those that have an answer for each element, whatever the data.
ALWAYS_PER_ELEMENT = ("tag", "forecast", "language")
# Those that tell what comes next, and so read forwards only.
FORWARDS = ("forecast", "language")
# The losses of each task, its default first.
LOSSES = {
    "classify": ("cross_entropy",),
    "tag": ("cross_entropy",),
    "regress": ("mse", "mae", "huber", "quantile"),
    "multilabel": ("bce",),
    "forecast": ("mse", "mae", "huber", "bce"),
    "language": ("cross_entropy",),
}
# The names in raglane.nn, which is not imported here: that would import torch.
LAYERS = (
    *("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm"),
    *("peephole_lstm", "coupled_lstm", "slstm", "grud", "cfc"),
)
NORMALISED_LAYERS = ("lstm", "gru")
POOLINGS = ("summary", "last", "first", "mean", "max", "logsumexp", "attention")
INITIAL_STATES = ("zeros", "learned", "lengths")
SCHEDULES = ("constant", "cosine", "plateau")
CLASS_WEIGHTS = ("none", "balanced")
OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop")
MISSING = ("error", "zero", "forward", "elapsed")
# The words of raglane.data.Limit, which is not imported here either.
TOO_LONG = ("refuse", "drop", "split", "alone")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("processes", "ray")
# The names of Lightning's loggers.
LOGGERS = ("tensorboard", "wandb", "mlflow")
