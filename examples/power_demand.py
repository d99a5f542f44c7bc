"""Forecast the power demand of Italy in the next hour, on days of 24 hours, with the official
split.

The days (ItalyPowerDemand, standardised) come with sktime (pip install 'raglane[demo]'): 67 for
training, 1,029 for the test. The error is compared with persistence, which predicts that the demand
stays the same.

    python examples/power_demand.py

Test mean absolute error: 0.152; persistence 0.343.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import raglane as rl


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Train, test, and return the errors of the model and of persistence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path",
        nargs="?",
        help="a folder with ItalyPowerDemand_TRAIN.ts and ItalyPowerDemand_TEST.ts",
    )
    parser.add_argument(
        "--epochs", type=int, default=100, help="passes over the training part (default: 100)"
    )
    options = parser.parse_args(arguments)
    found = find_spec("sktime")
    own = (
        Path()
        if found is None
        else Path(str(found.origin)).parent / "datasets" / "data" / "ItalyPowerDemand"
    )
    if options.path is None and found is None:
        parser.exit(
            2,
            f"{parser.prog}: sktime is not installed. Run pip install 'raglane[demo]', or pass a folder.\n",
        )
    folder = Path(options.path or own)
    files = [folder / f"ItalyPowerDemand_{part}.ts" for part in ("TRAIN", "TEST")]
    try:
        run = rl.fit(
            files[0], task="forecast", hidden_size=48, epochs=options.epochs, lr=0.01, batch_size=16
        )
        result = run.evaluate(files[1])
    except rl.errors.DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    error, persistence = result["mae"], result["persistence_mae"]
    print(f"test mean absolute error {error:.3f}, persistence {persistence:.3f}")
    return error, persistence


if __name__ == "__main__":
    main()
