"""Compute the quantiles of real lists of lengths that ``harness.lengths`` contains.

    python benchmarks/lengths.py DATA

DATA is a folder with ``lengths/librispeech_train-clean-100_samples16k.txt`` and
``lengths/ljspeech_mel_frames.txt`` (an integer a line), ``names/*.txt`` (a name a line),
``ewt/ewt_train_form_upos.tsv.gz`` (a token a line, an empty line between sentences) and
``trec/TREC.train`` (a question a line, its label first). Japanese vowels come with sktime. The
output replaces ``QUANTILES`` there. The lists are not copied: 101 numbers of each suffice to draw
similar lengths.
"""

from __future__ import annotations

import argparse
import gzip
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raglane.data import japanese_vowels

# Frames of 10 ms at 16 kHz; the convolutions of a speech recogniser keep every fourth.
_SAMPLES_A_STEP = 4 * 160
# Mel frames of 256 samples at 22.05 kHz; every fourth is kept.
_FRAMES_A_STEP = 4


def lists(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Return every list by its name, in the order of ``QUANTILES``."""
    spoken = folder / "lengths"
    samples = np.loadtxt(spoken / "librispeech_train-clean-100_samples16k.txt", dtype=np.int64)
    yield "librispeech", (samples // _SAMPLES_A_STEP).tolist()
    frames = np.loadtxt(spoken / "ljspeech_mel_frames.txt", dtype=np.int64)
    yield "ljspeech", (frames // _FRAMES_A_STEP).tolist()
    files = sorted(path for path in (folder / "names").glob("*.txt") if path.stem != "SOURCE")
    names = [
        line.strip() for path in files for line in path.read_text(encoding="utf-8").splitlines()
    ]
    yield "names", [len(name) for name in names if name]
    with gzip.open(folder / "ewt" / "ewt_train_form_upos.tsv.gz", "rt", encoding="utf-8") as file:
        sentences = file.read().split("\n\n")
    yield (
        "ewt",
        [len(sentence.strip("\n").split("\n")) for sentence in sentences if sentence.strip("\n")],
    )
    questions = (folder / "trec" / "TREC.train").read_text(encoding="latin-1").splitlines()
    yield "trec", [len(question.split()) - 1 for question in questions if question.strip()]
    yield "vowels", [length for part in japanese_vowels() for length in part.lengths.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    for name, lengths in lists(parser.parse_args().data):
        quantiles = np.quantile(lengths, np.linspace(0, 1, 101), method="nearest").astype(int)
        print(
            f'    # {len(lengths):,} lengths, {np.mean(lengths):.1f} on average.\n    "{name}": _numbers(\n        """'
        )
        print(
            textwrap.fill(
                " ".join(map(str, quantiles)),
                112,
                initial_indent=" " * 8,
                subsequent_indent=" " * 8,
            )
        )
        print('        """\n    ),')


if __name__ == "__main__":
    main()
