"""Train a language model of characters on names, and write new names.

PATH is a folder with text files, one name a line. Each name counts once; the epoch is selected on a
held-out tenth. The defaults are quick; with the settings of docs/tasks.md the result is 2.775.

    python examples/write_names.py PATH

Bits per character of the names held out, after 8 epochs: 2.999.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import raglane as rl
from raglane.training.inference import sample


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, write some names, and return the bits per character."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="a folder of .txt files with a name a line")
    parser.add_argument(
        "--epochs", type=int, default=8, help="passes over the training part (default: 8)"
    )
    parser.add_argument("--hidden", type=int, default=128, help="units of the LSTM (default: 128)")
    options = parser.parse_args(arguments)
    try:
        records = rl.data.read(options.path, rl.data.Columns(task="language"))
    except rl.errors.DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    names = sorted(
        {"".join(records.values[start:end]).strip() for start, end in pairwise(records.offsets)}
        - {""}
    )
    run = rl.fit(
        names,
        task="language",
        split="characters",
        cell="lstm",
        hidden_size=options.hidden,
        dropout=0.2,
        weight_dropout=0.2,
        optimizer="adamw",
        weight_decay=0.02,
        lr=0.004,
        lr_schedule="cosine",
        epochs=options.epochs,
        batch_size=64,
    )
    bits = (
        min(row["validation_bits_per_token"] for row in run.result.state.history)
        if run.result
        else float("nan")
    )
    print(*run.notes, sep="\n")
    print(
        f"bits per character {bits:.3f}; names like these: {', '.join(sample(run.saved, count=8, temperature=0.7))}"
    )
    return bits


if __name__ == "__main__":
    main()
