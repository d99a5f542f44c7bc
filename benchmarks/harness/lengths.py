"""Lengths of the sequences of a benchmark: synthetic, like real data, or from a user's file.

Real data are represented by 101 quantiles each, computed by ``benchmarks/lengths.py``; lengths are
drawn from the quantile function, with the same seed in every run. The sources:

- ``librispeech``: the 28,539 utterances of LibriSpeech train-clean-100 (CC BY 4.0), in the list of
  lengths of github.com/sungnyun/ARMHuBERT; every fourth frame of 10 ms, so that a step is 40 ms.
- ``ljspeech``: the 13,100 utterances of LJSpeech, in the alignments of github.com/xcmyz/FastSpeech;
  every fourth mel frame of 256 samples, so that a step is 46 ms.
- ``names``: the characters of 20,050 family names, github.com/spro/practical-pytorch.
- ``ewt``: the words of the 12,544 sentences of UD English-EWT's training part (CC BY-SA 4.0).
- ``trec``: the words of the 5,452 questions of TREC's training part, in
  github.com/harvardnlp/sent-conv-torch.
- ``vowels``: the steps of the 640 recordings of Japanese vowels, included in sktime.

No length is shortened: with every fourth frame, the longest has 613 steps, and a batch of 256 about
80,000 elements, so every call takes seconds at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from raglane._utils.messages import printable, shorten
from raglane.planner.probe import draw, lengths_of_file

__all__ = ["LENGTHS", "QUANTILES", "Lengths", "draw_like", "of_density", "of_file"]

_LOG_MEAN, _LOG_DEVIATION, _LONGEST = 3.3, 0.7, 400
_MEAN = 30


@dataclass(frozen=True)
class Lengths:
    """A rule that gives the lengths of a batch.

    Attributes:
        name: its name in tables and for ``--lengths``.
        description: one phrase.
        draw: from a number of sequences to that many lengths of at least 1; the same in every run.
        fewest: the least number of sequences of a batch.
    """

    name: str
    description: str
    draw: Callable[[int], list[int]] = field(compare=False, repr=False)
    fewest: int = 1


def draw_like(quantiles: tuple[int, ...], count: int, seed: int = 1) -> list[int]:
    """Draw lengths from the quantile function of a list: linear between its quantiles.

    Example:
        >>> drawn = draw_like((3, 5, 9), 1000)
        >>> min(drawn), max(drawn), 480 < sum(length <= 5 for length in drawn) < 620
        (3, 9, True)
    """
    knots = torch.tensor(quantiles, dtype=torch.float64)
    place = torch.rand(count, generator=_generator(seed), dtype=torch.float64) * (
        len(quantiles) - 1
    )
    below = place.long().clamp(max=len(quantiles) - 2)
    drawn = torch.lerp(knots[below], knots[below + 1], place - below)
    return _whole(drawn.round())


def of_file(path: Path) -> Lengths:
    """Return the lengths of a text file; a batch with another number of sequences draws from
    them.
    """
    listed = lengths_of_file(path)
    # The name is shown in tables and pictures.
    name, file = (shorten(printable(part), 40) for part in (path.stem, path.name))
    return Lengths(name, f"{len(listed):,} lengths of {file}", partial(draw, listed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _whole(numbers: Tensor) -> list[int]:
    listed: list[int] = numbers.long().tolist()
    return listed


def _equal(length: int) -> Callable[[int], list[int]]:
    return lambda count: [length] * count


def _uniform(count: int) -> list[int]:
    return _whole(torch.randint(1, 2 * _MEAN + 1, (count,), generator=_generator(1)))


def _lognormal(count: int) -> list[int]:
    normal = torch.randn(count, generator=_generator(1))
    return _whole((normal * _LOG_DEVIATION + _LOG_MEAN).exp().clamp(1, _LONGEST))


def _one_long(count: int) -> list[int]:
    """Return lengths of which only the last is long: without sorting, it starts last."""
    return [50] * (count - 1) + [10_000]


def of_density(density: float) -> Callable[[int], list[int]]:
    """Return a rule for batches with a given density, and 30 elements per sequence on average.

    Example:
        >>> lengths = of_density(0.25)(16)
        >>> max(lengths), sum(lengths)
        (120, 480)
    """

    def draw(count: int) -> list[int]:
        total, longest = _MEAN * count, round(_MEAN / density)
        # Shares u ** k of the longest have the mean 1 / (k + 1); the remainder of rounding is added
        # one by one.
        power = 1 / density - 1
        lengths = [
            max(1, round(longest * (place / (count - 1)) ** power)) for place in range(count)
        ]
        step = 1 if sum(lengths) < total else -1
        place = 0
        while sum(lengths) != total:
            if 1 <= lengths[place] + step <= longest and place < count - 1:
                lengths[place] += step
            place = (place + 1) % count
        order = torch.randperm(count, generator=_generator(1)).tolist()
        return [lengths[place] for place in order]

    return draw


def _real(name: str) -> Callable[[int], list[int]]:
    return lambda count: draw_like(QUANTILES[name], count, seed=zlib.crc32(name.encode()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split())


QUANTILES: dict[str, tuple[int, ...]] = {
    # 28,539 lengths, 316.8 on average.
    "librispeech": _numbers(
        """
        35 62 74 84 95 106 116 127 138 150 161 172 183 194 205 215 224 234 242 251 259 267 273 279 285 290 295
        299 303 306 310 313 315 318 320 323 325 327 329 331 333 335 337 339 340 342 344 345 347 348 349 351 352
        354 355 356 358 359 360 361 362 364 365 366 367 368 369 370 371 372 373 374 376 377 378 379 380 381 382
        383 384 385 386 387 388 389 390 391 393 394 395 396 397 399 400 402 404 407 411 417 613
        """
    ),
    # 13,100 lengths, 141.3 on average.
    "ljspeech": _numbers(
        """
        24 35 42 49 54 57 61 64 68 71 73 76 78 81 84 86 89 91 93 95 97 99 101 103 105 107 109 110 112 114 116
        117 119 120 122 124 125 127 128 130 131 133 134 135 137 138 140 141 143 144 145 147 148 150 151 153 154
        155 157 158 160 161 163 164 165 167 168 169 171 172 173 175 176 178 179 180 182 183 184 186 187 188 190
        191 193 194 195 197 198 200 202 203 205 206 208 209 211 212 214 216 217
        """
    ),
    # 20,050 lengths, 7.1 on average.
    "names": _numbers(
        """
        2 3 4 4 4 4 4 4 4 5 5 5 5 5 5 5 5 5 5 5 5 5 5 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 6 7 7 7 7 7 7 7 7 7 7
        7 7 7 7 7 7 7 7 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 8 9 9 9 9 9 9 9 9 9 9 9 10 10 10 10 10 10 10 11 11 11 11
        12 12 20
        """
    ),
    # 12,544 lengths, 16.3 on average.
    "ewt": _numbers(
        """
        1 1 1 1 1 2 2 2 2 2 3 3 3 3 4 4 5 5 5 5 6 6 6 7 7 7 7 8 8 8 9 9 9 9 10 10 10 10 11 11 11 11 12 12 12 13
        13 13 13 14 14 14 15 15 15 15 16 16 16 17 17 17 18 18 18 19 19 19 20 20 20 21 21 22 22 22 23 23 24 24 25
        25 26 27 27 28 29 29 30 31 32 33 34 36 38 39 41 44 49 57 159
        """
    ),
    # 5,452 lengths, 10.2 on average.
    "trec": _numbers(
        """
        3 4 4 5 5 5 5 5 6 6 6 6 6 6 6 7 7 7 7 7 7 7 7 7 7 7 8 8 8 8 8 8 8 8 8 8 8 9 9 9 9 9 9 9 9 9 9 9 9 9 10
        10 10 10 10 10 10 10 10 10 11 11 11 11 11 11 11 11 11 11 12 12 12 12 12 12 12 12 12 13 13 13 13 13 14 14
        14 14 15 15 15 16 16 16 17 17 18 19 20 22 37
        """
    ),
    # 640 lengths, 15.6 on average.
    "vowels": _numbers(
        """
        7 9 10 10 10 10 11 11 11 11 11 11 11 12 12 12 12 12 12 12 12 13 13 13 13 13 13 13 13 13 13 14 14 14 14
        14 14 14 14 14 14 14 15 15 15 15 15 15 15 15 15 15 15 15 16 16 16 16 16 16 16 16 16 16 16 17 17 17 17 17
        17 17 17 17 18 18 18 18 18 18 18 18 19 19 19 20 20 20 20 21 21 21 21 21 22 22 23 23 24 25 29
        """
    ),
}
"""The 0th, 1st ... 100th percentile of real lists of lengths."""

LENGTHS: dict[str, Lengths] = {
    lengths.name: lengths
    for lengths in (
        Lengths("equal", f"{_MEAN} each", _equal(_MEAN)),
        Lengths("uniform", f"uniform from 1 to {2 * _MEAN}", _uniform),
        Lengths(
            "lognormal",
            f"lognormal: log-mean {_LOG_MEAN}, log-sd {_LOG_DEVIATION}, from 1 to {_LONGEST}",
            _lognormal,
        ),
        Lengths(
            "librispeech", "like LibriSpeech's utterances in steps of 40 ms", _real("librispeech")
        ),
        Lengths("ljspeech", "like LJSpeech's utterances in steps of 46 ms", _real("ljspeech")),
        Lengths("names", "like family names in characters", _real("names")),
        Lengths("ewt", "like the sentences of English-EWT in words", _real("ewt")),
        Lengths("trec", "like the questions of TREC in words", _real("trec")),
        Lengths("vowels", "like the recordings of Japanese vowels in steps", _real("vowels")),
        Lengths(
            "density-0.1",
            f"{_MEAN} on average, the longest {10 * _MEAN}: density 0.1",
            of_density(0.1),
            fewest=32,
        ),
        Lengths("one-long", "50 each, and one of 10,000", _one_long, fewest=2),
        Lengths("tens", "10 each", _equal(10)),
    )
}
"""Every rule by its name."""
