"""Who does a training: this process, or several."""

from __future__ import annotations

from dataclasses import replace

from raglane.training.bookkeeper import Watcher
from raglane.training.ranks.elsewhere import found, lead
from raglane.training.work import TrainingResult, Work, perform


def spread(work: Work, watcher: Watcher | None = None) -> TrainingResult:
    """Do a training in this process, or in as many as its settings say."""
    others = found()
    if others is not None:
        # For what does not go with several ranks; how many there are is not a choice of the run.
        replace(work.settings, ranks=others.count)
        return lead(work, watcher, others)
    if work.settings.engine == "ray":
        from raglane.training.ranks.on_ray import launch_on_ray

        return launch_on_ray(work, watcher)
    if work.settings.ranks == 1:
        return perform(work, watcher=watcher)
    from raglane.training.ranks.launch import launch

    return launch(work, watcher)
