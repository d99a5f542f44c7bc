"""Every row up to the longest, and a row whose sequence has ended keeps its state."""

from __future__ import annotations

from raglane.schedules.padded import Padded


class Masked(Padded):
    """The rows and steps of :class:`~raglane.schedules.padded.Padded`, with a mask that holds ended rows' states.

    Known as a "dynamic" or masked recurrent network, and what Keras and Flax do: the last state of a row is the
    state after the sequence's own last element, so nothing has to be cut to find it.
    """

    name = "masked"
    holds_state = True
