"""What is stored of a preprocessor, checked on the way back in: it may be damaged, or edited by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raglane.data.encoders import FeatureEncoder
from raglane.data.targets import TASKS
from raglane.data.vocabulary import END, UNKNOWN
from raglane.errors import CheckpointError, message, quote, quote_all

if TYPE_CHECKING:
    from raglane.data.preprocess import Preprocessor

__all__ = ["OPTIONAL", "TUPLES", "check_fitted", "read_config"]

# The attributes that are tuples, and those of them that may be None.
OPTIONAL = ("mean", "std", "vocabulary", "labels")
TUPLES = ("channels", *OPTIONAL, "target_names", "target_mean", "target_std")
_NUMBERS = ("mean", "std", "target_mean", "target_std")
# What models of the first format do not have.
_LATER = ("split", "per_element", "target_names", "target_mean", "target_std", "features")


def read_config(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The attributes of a preprocessor, of JSON values."""
    given: Any = config
    if not isinstance(given, Mapping):
        rule = f"an object with {', '.join(names)}"
        raise CheckpointError(message("preprocessing", quote(config), rule, "train again"))
    odd = sorted(map(str, (set(names) - set(_LATER) - set(config)) | (set(config) - set(names))))
    if odd:
        got = f"entries {quote_all(odd)} missing or unknown"
        raise CheckpointError(message("preprocessing", got, f"exactly {', '.join(names)}", "train again"))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }
    features = values.get("features", ())
    if not isinstance(features, tuple):
        raise CheckpointError(message("preprocessing", f"features = {quote(features)}", "a list", "train again"))
    values["features"] = tuple(map(FeatureEncoder.from_config, features))
    for name in TUPLES:
        kind = (int, float) if name in _NUMBERS else str
        value = values.setdefault(name, ())
        # To Python a bool is an int.
        fits = isinstance(value, tuple) and all(
            isinstance(entry, kind) and not isinstance(entry, bool) for entry in value
        )
        if not fits and (value is not None or name not in OPTIONAL):
            got, rule = f"{name} = {quote(value)}", "a list of numbers or strings"
            raise CheckpointError(message("preprocessing", got, rule, "train again"))
    return values


def check_fitted(fitted: Preprocessor) -> None:
    """Refuse attributes that do not go together."""
    if fitted.task == "language" and (fitted.vocabulary is None or fitted.vocabulary[:2] != (UNKNOWN, END)):
        got, rule = f"vocabulary = {quote(fitted.vocabulary)}"[:80], f"tokens, the first two {UNKNOWN} and {END}"
        raise CheckpointError(message("preprocessing", got, rule, "train again"))
    if not isinstance(fitted.split, str | None):
        raise CheckpointError(message("preprocessing", f"split = {quote(fitted.split)}", "a text", "train again"))
    if not isinstance(fitted.per_element, bool):
        got = f"per_element = {quote(fitted.per_element)}"
        raise CheckpointError(message("preprocessing", got, "true, false or null", "train again"))
    wanted = TASKS[fitted.task].label
    for name, is_wanted in (("labels", wanted in ("class", "set")), ("target_names", wanted == "numbers")):
        value = getattr(fitted, name) or None
        if (value is not None) != is_wanted:
            got = f"{name} = {quote(value)} for the task {fitted.task!r}"
            rule = "labels for classes, names for numbers to learn, and neither for a forecast"
            raise CheckpointError(message("preprocessing", got, rule, "train again"))
