"""Samplers that iterate over data epoch by epoch, and resume within an epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from raglane._utils.checks import check_kind, check_whole
from raglane._utils.messages import quote
from raglane.errors import ArgumentError

Item = TypeVar("Item")


class Epochs(Generic[Item]):
    """Base class of samplers with a resumable position.

    The items of an epoch are a function of the arguments and the number of the epoch. After all
    items of an epoch were returned, the next iteration is the next epoch; :meth:`set_epoch` selects
    one (Lightning calls it).
    """

    # The keys of a state that describe a position.
    _state_names: tuple[str, ...] = ("epoch", "done")

    def __init__(self) -> None:
        self.epoch = 0
        # The number of items returned in this epoch, and the first item of the next iteration.
        self._done = 0
        self._start = 0
        # True if an iteration of this epoch has ended, also of one without items.
        self._ended = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of items in an epoch."""

    @abstractmethod
    def _items(self, start: int) -> Iterator[Item]:
        """Yield the items of the epoch from number ``start`` on."""

    @abstractmethod
    def _identity(self) -> dict[str, int]:
        """Return the numbers that must agree before a state is loaded."""

    def set_epoch(self, epoch: int) -> None:
        """Select the next epoch, from 0; if it is another or a finished one, it begins at its first
        batch.
        """
        epoch = check_whole("epoch", epoch, 0)
        if epoch != self.epoch or self._is_finished():
            self.epoch = epoch
            self._done = self._start = 0
        self._ended = False

    def _is_finished(self) -> bool:
        """Return True if the next iteration begins a new epoch."""
        return self._ended or self._is_end(self._done)

    def _is_end(self, done: int) -> bool:
        """Return True if ``done`` is the number of items of the epoch, and not 0."""
        return 0 < done == len(self)

    def __iter__(self) -> Iterator[Item]:
        """Yield all items of the epoch, or after :meth:`load_state_dict` the remaining ones."""
        if self._is_finished():
            self.set_epoch(self.epoch + 1)
        self._done = self._start
        self._start = 0
        for item in self._items(self._done):
            self._done += 1
            yield item
        self._ended = True

    def state_dict(self, done: int | None = None) -> dict[str, int]:
        """Return the position as integers.

        After the last batch of an epoch, it is the start of the next epoch.

        Args:
            done: the number of batches of this epoch that were used. None takes the number of
                batches returned, which is larger with DataLoader workers, since they prefetch.

        Raises:
            ArgumentTypeError: ``done`` is not an int.
            ArgumentError: ``done`` is below 0 or above the number of batches.
        """
        is_finished = done is None and self._ended
        done = check_whole("done", self._done if done is None else done, 0)
        position = {"epoch": self.epoch, "done": done, **self._position(done)}
        if is_finished or self._is_end(done):
            position = {**dict.fromkeys(position, 0), "epoch": self.epoch + 1}
        return {**position, **self._identity()}

    def _position(self, done: int) -> dict[str, int]:
        """Return the entries of a state in addition to ``done``; raise an ArgumentError beyond the
        last item.
        """
        self._check_done("done", done)
        return {}

    def _restore(self, state: Mapping[str, int]) -> None:
        """Check the position of a state, then restore the attributes that depend on it."""
        self._check_done("state['done']", state["done"])

    def _check_done(self, name: str, done: int) -> None:
        if done > len(self):
            rule = f"from 0 to the number of batches, {len(self)}"
            raise ArgumentError(name, quote(done), rule, "pass a number of batches of this epoch")

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where :meth:`state_dict` was called: the next iteration returns exactly the
        remaining items.

        Raises:
            ArgumentTypeError: the state is not a mapping to ints.
            ArgumentError: the state belongs to other sequences or arguments.
        """
        kind = type(self).__name__
        check_kind(
            "state", state, Mapping, f"the state of this {kind}", "pass the result of state_dict()"
        )
        for name, mine in {**dict.fromkeys(self._state_names), **self._identity()}.items():
            if name not in state or (mine is not None and state[name] != mine):
                got = f"{name} = {quote(state.get(name))}"
                rule = (
                    f"the state of this {kind}"
                    if mine is None
                    else f"of this {kind}, which has {name} = {mine}"
                )
                raise ArgumentError(
                    "state", got, rule, f"create the {kind} with the same arguments"
                )
        for name in self._state_names:
            check_whole(f"state[{name!r}]", state[name], 0)
        self._restore(state)
        self.epoch = state["epoch"]
        self._ended = False
        self._done = self._start = state["done"]
        # States of earlier versions have the last batch of an epoch, not the start of the next.
        if self._is_end(self._done):
            self.set_epoch(self.epoch + 1)
