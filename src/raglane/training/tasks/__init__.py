"""What a model is trained for: one file per task, and one line in ``TASKS``.

A task knows how many numbers the head gives, the loss, the metrics, the baseline and what predictions look like. What
it wants of the data stands in :data:`raglane.data.records.TASKS`.
"""

from __future__ import annotations

from raglane.data.preprocess import Preprocessor
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Meter, Score, Task
from raglane.training.tasks.classify import Classify
from raglane.training.tasks.forecast import Forecast
from raglane.training.tasks.multilabel import MultiLabel
from raglane.training.tasks.regress import Regress
from raglane.training.tasks.tag import Tag

__all__ = ["TASKS", "Measured", "Meter", "Score", "Task", "make_task"]

TASKS: dict[str, type[Task]] = {
    "classify": Classify,
    "tag": Tag,
    "regress": Regress,
    "multilabel": MultiLabel,
    "forecast": Forecast,
}
"""The tasks by name, as :data:`raglane.training.settings.TASKS` lists them."""


def make_task(preprocessor: Preprocessor, settings: ModelSettings) -> Task:
    """The task of a model.

    Args:
        preprocessor: what was learned of the training part.
        settings: of the model, or of the training.

    Example:
        >>> make_task(Preprocessor("classify", labels=("no", "yes")), ModelSettings("classify")).metric
        'accuracy'
    """
    return TASKS[settings.task](preprocessor, settings)
