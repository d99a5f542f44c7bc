"""Distributions of :mod:`torch.distributions` whose parameters are ragged batches.

Those of torch accept no Ragged, because they check that values are tensors and that shapes have
sizes. These have the same names, arguments and methods, and compute with torch's on the flat rows,
so each real element counts once:

>>> from raglane.ragged import Ragged
>>> policy = Categorical(logits=Ragged([torch.zeros(3, 4), torch.zeros(1, 4)]))
>>> actions = policy.sample()
>>> actions.lengths.tolist(), policy.log_prob(actions).exp().tolist()
([3, 1], [[0.25, 0.25, 0.25], [0.25]])
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane.errors import ArgumentTypeError
from raglane.ragged import Ragged
from raglane.ragged.face.entry import rows_of

__all__ = ["Bernoulli", "Categorical", "Normal"]


class _Distribution:
    """A distribution of torch for each element of a Ragged."""

    _of_torch: ClassVar[Any]

    def __init__(self, **kwargs: Any) -> None:
        batches = [value for value in kwargs.values() if isinstance(value, Ragged)]
        name = type(self).__name__
        if not batches:
            fix = f"call torch.distributions.{name} for tensors"
            raise ArgumentTypeError("parameters", "no Ragged", "at least one Ragged", fix)
        # The one with the most dimensions, to which the others are broadcast.
        self._batch = max(batches, key=lambda batch: batch.ndim)
        for batch in batches:
            batch._needs_lengths_of("parameters", self._batch, "the other parameters")
        if not self._batch.values.shape[0] and kwargs["validate_args"] is None:
            kwargs["validate_args"] = False  # torch's checks of empty tensors fail
        self.of_rows = self._of_torch(**{key: self._rows(value) for key, value in kwargs.items()})

    def _rows(self, value: Any) -> Any:
        return rows_of(type(self).__name__, value, self._batch)

    def _like(self, rows: Tensor) -> Any:
        return self._batch._like(rows)

    def sample(self) -> Any:
        """Draw a value for each element, without gradients."""
        return self._like(self.of_rows.sample())

    def log_prob(self, value: Any) -> Any:
        """Return the logarithm of the probability, or of its density, of a value per element.

        Args:
            value: a Ragged of the same lengths; or what broadcasts to one, e.g. a number.

        Raises:
            ShapeError: other lengths.
        """
        if isinstance(value, Ragged):
            value._needs_lengths_of("value", self._batch, "the parameters")
        rows = self._rows(value)
        if not isinstance(rows, Tensor):
            rows = torch.as_tensor(rows, device=self._batch.device)
        return self._like(self.of_rows.log_prob(rows))

    def entropy(self) -> Any:
        """Return the entropy of each element."""
        return self._like(self.of_rows.entropy())

    def __getattr__(self, name: str) -> Any:
        # Such as mean, stddev, probs and logits, which have a row per element.
        if name in ("of_rows", "_batch") or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.of_rows, name)
        has_rows = isinstance(found, Tensor) and found.shape[:1] == self._batch.values.shape[:1]
        return self._like(found) if has_rows else found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batch!r})"


class Categorical(_Distribution):
    """A class per element: ``Categorical(probs=None, logits=None)``, values ``(N, C)``.

    Samples, ``log_prob`` and ``entropy`` are Ragged ``(N,)``.

    Example:
        >>> Categorical(logits=Ragged([torch.zeros(3, 4)])).entropy().exp()[0].tolist()
        [4.0, 4.0, 4.0]
    """

    _of_torch = torch.distributions.Categorical

    def __init__(
        self,
        probs: Ragged | None = None,
        logits: Ragged | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(probs=probs, logits=logits, validate_args=validate_args)


class Normal(_Distribution):
    """A normal distribution per number: ``Normal(loc, scale)``, of which one may be a number, or a
    tensor that broadcasts to the other.

    Example:
        >>> normal = Normal(Ragged([[0.0, 1.0], [2.0]]), 1.0)
        >>> normal.log_prob(normal.mean).exp()[1]
        tensor([0.3989])
    """

    _of_torch = torch.distributions.Normal

    def __init__(
        self,
        loc: Ragged | Tensor | float,
        scale: Ragged | Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(loc=loc, scale=scale, validate_args=validate_args)

    def rsample(self) -> Any:
        """Draw a value for each element, with gradients of the parameters."""
        return self._like(self.of_rows.rsample())


class Bernoulli(_Distribution):
    """A 0 or 1 per number: ``Bernoulli(probs=None, logits=None)``.

    Example:
        >>> Bernoulli(logits=Ragged([[0.0, 0.0]])).log_prob(1.0).exp().tolist()
        [[0.5, 0.5]]
    """

    _of_torch = torch.distributions.Bernoulli

    def __init__(
        self,
        probs: Ragged | None = None,
        logits: Ragged | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(probs=probs, logits=logits, validate_args=validate_args)
