"""An interpolated Kneser-Ney model of characters, the baseline of language models of ``raglane
train``.

PATH is that of ``raglane train PATH --task language``. The same texts are held out, by the same
seed. The ends of texts are predicted too.

    python benchmarks/kneser_ney.py PATH --order 5

The method is that of Kneser and Ney (1995), in the notation of Chen and Goodman (1999): the mass
that is discounted from each count goes to the lower order, which counts contexts instead of
occurrences. The discount of an order is ``n1 / (n1 + 2 n2)``, where ``n1`` n-grams occur once and
``n2`` twice; ``--modified`` uses three discounts, for counts of 1, 2 and more.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import raglane as rl
from raglane.runs.parts import hold_out

BEGIN, END = "<begin>", "<end>"

Gram = tuple[str, ...]


class KneserNey:
    """A model of the probability of a token after the previous ``order - 1`` tokens.

    Args:
        texts: the training texts, each a sequence of tokens.
        order: the length of n-grams, at least 1.
        modified: True for separate discounts of counts of 1, 2 and more.

    Example:
        >>> model = KneserNey([["a", "b"], ["a"]], order=2)
        >>> round(sum(model.probability(token, ("a",)) for token in model.tokens), 9)
        1.0
    """

    def __init__(
        self, texts: Iterable[Sequence[str]], order: int, *, modified: bool = False
    ) -> None:
        self.order = order
        whole: Counter[Gram] = Counter()
        for text in texts:
            padded = (*[BEGIN] * (order - 1), *text, END)
            whole.update(padded[start : start + order] for start in range(len(padded) - order + 1))
        counts = [whole]
        for _ in range(order - 1):
            # For a lower order: the number of contexts of each.
            counts.insert(0, Counter(gram[1:] for gram in counts[0]))
        self.counts = counts
        self.tokens = sorted({gram[-1] for gram in whole})
        self.discounts = [_discounts(grams, modified) for grams in counts]
        self.totals: list[Counter[Gram]] = []
        self.given: list[dict[Gram, float]] = []
        for grams, discounts in zip(counts, self.discounts, strict=True):
            total: Counter[Gram] = Counter()
            given: dict[Gram, float] = {}
            for gram, count in grams.items():
                total[gram[:-1]] += count
                given[gram[:-1]] = given.get(gram[:-1], 0.0) + discounts[min(count, 3) - 1]
            self.totals.append(total)
            self.given.append(given)

    def probability(self, token: str, context: Gram) -> float:
        """Return the probability of a known token after the last tokens of a context."""
        # The lowest order is uniform over all tokens and an unknown one.
        found = 1 / (len(self.tokens) + 1) if token not in self.tokens else 1 / len(self.tokens)
        context = context[len(context) - self.order + 1 :] if self.order > 1 else ()
        for place, grams in enumerate(self.counts):
            before = context[len(context) - place :]
            total = self.totals[place][before]
            if total:
                count = grams[(*before, token)]
                kept = count - self.discounts[place][min(count, 3) - 1] if count else 0.0
                found = (kept + self.given[place][before] * found) / total
        return found

    def bits(self, texts: Iterable[Sequence[str]]) -> tuple[float, int]:
        """Return the bits of some texts with their ends, and the number of tokens."""
        bits, count = 0.0, 0
        for text in texts:
            padded = (*[BEGIN] * (self.order - 1), *text, END)
            for end in range(self.order - 1, len(padded)):
                bits -= math.log2(self.probability(padded[end], padded[:end]))
                count += 1
        return bits, count


def _discounts(grams: Counter[Gram], modified: bool) -> tuple[float, float, float]:
    """Return the discounts of counts of 1, 2 and more, from the numbers of n-grams with such
    counts.
    """
    having = Counter(min(count, 5) for count in grams.values())
    one, two, three, four = (having[count] for count in (1, 2, 3, 4))
    share = one / (one + 2 * two) if one else 0.5
    if not (modified and one and two and three and four):
        return (share, share, share)
    # Between 0 and the count.
    found = (1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three)
    return tuple(
        min(max(discount, 0.0), most) for discount, most in zip(found, (1, 2, 3), strict=True)
    )  # type: ignore[return-value]


def texts_of(records: rl.data.Dataset) -> list[list[str]]:
    """Return the tokens of each text."""
    return [records.values[start:end].tolist() for start, end in pairwise(records.offsets)]


def main(arguments: Sequence[str] | None = None) -> float:
    """Print and return the bits per character of the held-out part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="texts: a file, or a folder of files")
    parser.add_argument("--order", type=int, default=5, help="of the n-grams (default: 5)")
    parser.add_argument(
        "--modified", action="store_true", help="three discounts per order in place of one"
    )
    parser.add_argument(
        "--validation-fraction", type=float, default=0.1, help="share held out (default: 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the held-out part (default: 0)")
    options = parser.parse_args(arguments)
    try:
        records = rl.data.read(options.path, rl.data.Columns(task="language"))
        kept, held = hold_out(records, options.validation_fraction, options.seed)
    except rl.errors.RaglaneError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    model = KneserNey(texts_of(kept), options.order, modified=options.modified)
    bits, count = model.bits(texts_of(held))
    print(
        f"{options.order}-grams of {len(kept):,} texts; {len(held):,} held out: {bits / count:.3f} bits per character"
    )
    return bits / count


if __name__ == "__main__":
    main()
