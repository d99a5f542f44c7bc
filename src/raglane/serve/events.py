"""Starts and ends of speech, or of other events, in the probabilities of a stream."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from raglane._utils.checks import check_count, check_real
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError


class Event(NamedTuple):
    """The first frame of an event, or the first frame after it."""

    kind: Literal["start", "end"]
    frame: int


class Events:
    """Finds the starts and ends of events, e.g. of speech, in the probabilities of a stream's frames.

    An event begins with a frame of at least ``threshold``, and lasts until ``pause`` frames in a row are
    below ``end_threshold``, which are no part of it. Events of less than ``min_length`` frames are ignored. The
    result does not depend on how the frames are divided into calls.

    Args:
        threshold: the probability of a frame that begins an event.
        end_threshold: the probability below which a frame is a pause, at most ``threshold``.
        min_length: the smallest number of frames of an event, of which short pauses are a part.
        pause: the frames of a pause that ends an event.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.

    Example:
        >>> events = rl.serve.Events(0.5, 0.3, min_length=2, pause=2)
        >>> events.push([0.1, 0.9, 0.4])
        [Event(kind='start', frame=1)]
        >>> events.push([0.1, 0.6, 0.1, 0.2])
        [Event(kind='end', frame=5)]
    """

    def __init__(
        self,
        threshold: float = 0.5,
        end_threshold: float = 0.35,
        *,
        min_length: int = 1,
        pause: int = 1,
    ) -> None:
        for name, number in (("threshold", threshold), ("end_threshold", end_threshold)):
            rule = "a number from 0 to 1"
            check_real(name, number, rule, lambda value: 0 <= value <= 1, "pass e.g. 0.5")
        if end_threshold > threshold:
            got = quote(end_threshold)
            rule = f"at most threshold = {threshold}"
            raise ArgumentError("end_threshold", got, rule, "pass a smaller one")
        self._start = threshold
        self._end = end_threshold
        self._least = check_count("min_length", min_length)
        self._pause = check_count("pause", pause)
        self._at = 0  # frames so far
        self._first = -1  # the first frame of the event; -1 without one
        self._last = -1  # the last frame of the event that was no pause
        self._is_told = False

    def push(self, probabilities: Any) -> list[Event]:
        """Return the starts and ends that the next frames make certain.

        Args:
            probabilities: ``(n,)`` or ``(n, 1)``, one per frame; NaN is a pause.

        Raises:
            ArgumentTypeError: they are not numbers.
        """
        try:
            values = np.asarray(probabilities, np.float64).reshape(-1).tolist()
        except (TypeError, ValueError) as error:
            rule = "one number per frame"
            fix = "pass the results of a stream"
            raise ArgumentTypeError("probabilities", quote(probabilities), rule, fix) from error
        events = []
        for value in values:
            if self._first < 0:
                if value >= self._start:
                    self._first = self._last = self._at
            elif value >= self._end:
                self._last = self._at
            elif self._at - self._last >= self._pause:
                events += self._ended()
            is_long = self._last + 1 - self._first >= self._least
            if self._first >= 0 and is_long and not self._is_told:
                self._is_told = True
                events.append(Event("start", self._first))
            self._at += 1
        return events

    def close(self) -> list[Event]:
        """Return the end of the event that lasts at the end of the sequence; begin a new sequence."""
        events = self._ended()
        self._at = 0
        return events

    def _ended(self) -> list[Event]:
        events = [Event("end", self._last + 1)] if self._is_told else []
        self._first = -1
        self._is_told = False
        return events
