"""Seasonal differences of the elements of a forecast (Box and Jenkins, 1970)."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane import segments


def width(channels: int, season: int) -> int:
    """Return the number of channels that :func:`differences` returns; 0 without a season."""
    return 2 * channels + 1 if season else 0


def differences(values: Tensor, offsets: Tensor, season: int) -> Tensor:
    """Return the differences between elements that are one season apart.

    Args:
        values: ``(N, C)``, elements of sequences.
        offsets: ``(B + 1,)`` int64.
        season: the number of steps of a season, at least 2.

    Returns:
        ``(N, 2C + 1)``: for element t of a sequence ``x[t] - x[t - season]``;
        ``x[t + 1 - season] - x[t]``, which leads to the element one season before the next; and 1.
        In the first season, where ``x[t - season]`` does not exist, all are 0.
    """
    before = segments.shift(values, offsets, season)
    following = segments.shift(values, offsets, season - 1)
    exists = segments.shift(torch.ones_like(values[:, :1]), offsets, season)
    return torch.cat([(values - before) * exists, (following - values) * exists, exists], dim=1)


class Past:
    """The last elements of each sequence and its forecasts, for their seasonal differences.

    Args:
        values: ``(N, C)``, elements of sequences.
        offsets: ``(B + 1,)`` int64.
        season: the number of steps of a season; 0 for none.
        horizon: the largest number of forecasts.
    """

    def __init__(self, values: Tensor, offsets: Tensor, season: int, horizon: int) -> None:
        self.season = season
        self.count = 0
        if not season or horizon == 1:
            return
        channels = values.shape[1]
        count = len(offsets) - 1
        ends = offsets[1:].unsqueeze(1)
        rows = ends - season + torch.arange(season, device=values.device)
        exists = rows >= offsets[:-1].unsqueeze(1)
        if values.shape[0]:
            past = torch.where(exists.unsqueeze(2), values[rows.clamp(min=0)], torch.nan)
        else:
            past = values.new_full((count, season, channels), torch.nan)
        # The element before forecast h, 0 for the first, is in the column season - 1 + h.
        self.elements = torch.cat([past, past.new_zeros(count, horizon, channels)], dim=1)

    def add(self, element: Tensor) -> list[Tensor]:
        """Add the next element ``(B, C)`` of each sequence; return its channels of seasons."""
        if not self.season:
            return []
        self.elements[:, self.season + self.count] = element
        before = self.elements[:, self.count]
        following = self.elements[:, self.count + 1]
        self.count += 1
        exists = ~before.isnan().any(1, keepdim=True)
        parts = [element - before, following - element]
        return [*(torch.where(exists, part, 0.0) for part in parts), exists.to(element.dtype)]
