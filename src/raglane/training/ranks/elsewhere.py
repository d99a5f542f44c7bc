"""Ranks that somebody else has started, on one machine or several: torchrun, or whatever sets the same variables.

Each of them runs the same command. The first one does all of it, and when it comes to the training it gives its work to
the others, which have waited for it: they read no file of data, and print nothing.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from raglane.errors import LostRankError, current_flags, flags
from raglane.training.job import Job, TrainingResult
from raglane.training.ranks.group import Ranks, lost, ranks_of
from raglane.training.trainer import Trainer, Watcher


def lead(job: Job, watcher: Watcher | None, ranks: Ranks) -> TrainingResult:
    """Do a training with ranks that wait for it."""
    ranks.join()
    try:
        ranks.from_first((job, current_flags()))
        result = Trainer(job, ranks, watcher).run()
        ranks.from_first(result)
        return result
    except (RuntimeError, LostRankError) as error:
        if not isinstance(error, LostRankError) and not ranks.is_lost(error):
            raise
        raise lost("a rank that has gone", job.folder) from error
    finally:
        ranks.leave()


def followed() -> TrainingResult | None:
    """Do this rank's part of a training that the first one leads; None where this process leads, or is alone."""
    ranks = ranks_of() if os.environ.get("RANK", "0") != "0" else None
    if ranks is None:
        return None
    ranks.join()
    try:
        job, names = ranks.from_first(None)
        with flags(names):
            Trainer(job, ranks).run()
        result: TrainingResult = ranks.from_first(None)
    except LostRankError:
        raise SystemExit(2) from None
    except RuntimeError as error:
        if ranks.is_lost(error):
            raise SystemExit(2) from None
        raise
    finally:
        with suppress(RuntimeError):
            ranks.leave()
    if result.stopped_by is not None:
        raise SystemExit(128 + signal.Signals(result.stopped_by))
    return result
