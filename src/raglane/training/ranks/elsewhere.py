"""Ranks that somebody else has started, on one machine or several: torchrun, or whatever sets the same variables.

Each of them runs the same command. The first one does all of it, and when it comes to the training it gives its work to
the others, which have waited for it: they read no file of data, and print nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from raglane.errors import ArgumentError, LostRankError, current_flags, flags, message, quote
from raglane.training.bookkeeper import Watcher
from raglane.training.ranks.group import Ranks, lost
from raglane.training.work import TrainingResult, Work, perform

_NUMBERS = {"rank": "RANK", "count": "WORLD_SIZE", "local": "LOCAL_RANK"}
# Where they meet.
_MEET = ("MASTER_ADDR", "MASTER_PORT")


def found(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that this process is one of, as its environment says; None where it says of no others."""
    if any(name not in environment for name in (*_NUMBERS.values(), *_MEET)):
        return None
    numbers = {}
    for name, variable in _NUMBERS.items():
        text = environment[variable]
        if not text.isdecimal():
            fix = "start the command with torchrun, or unset it"
            raise ArgumentError(message(variable, quote(text), "a whole number from 0", fix))
        numbers[name] = int(text)
    return Ranks(numbers["rank"], numbers["count"], numbers["local"]) if numbers["count"] > 1 else None


def lead(work: Work, watcher: Watcher | None, ranks: Ranks) -> TrainingResult:
    """Do a training with ranks that wait for it."""
    ranks.join()
    try:
        ranks.from_first((work, current_flags()))
        result = perform(work, ranks=ranks, watcher=watcher)
        ranks.from_first(result)
        return result
    except (RuntimeError, LostRankError) as error:
        if not isinstance(error, LostRankError) and not ranks.is_lost(error):
            raise
        raise lost("a rank that has gone", work.folder) from error
    finally:
        ranks.leave()


def follow(ranks: Ranks) -> TrainingResult:
    """Do this rank's part of a training that the first one leads."""
    ranks.join()
    try:
        work, names = ranks.from_first(None)
        with flags(names):
            perform(work, ranks=ranks)
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
