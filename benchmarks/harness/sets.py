"""Sets of sequences for comparing the defaults of training.

Sets of archives come with the packages sktime, aeon, tslearn, seglearn, statsmodels and
scikit-learn, whose files are read without importing the package, and the sentences are those of the
standard library of Python; the others are drawn here.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

import raglane as rl

# Longer series are averaged over blocks, so that they have at most so many steps.
LONGEST = 200
# The column of the orders of electrical equipment.
ORDERS = "STS.M.I7.W.TOVT.NS0016.4.000"


class Split(NamedTuple):
    """Sequences and their labels or targets, for training and for the test.

    Of a forecast, the test has the series of the training and the ``horizon`` elements after them.
    """

    train: Any
    train_labels: Any
    test: Any
    test_labels: Any
    horizon: int = 1


def folder_of(package: str, *parts: str) -> Path:
    """Return a folder of an installed package, which is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the sets need the files of {package}: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0], *parts)


def shortened(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return series of at most :data:`LONGEST` steps, the means of blocks of equal length."""
    width = -(-max(map(len, sequences)) // LONGEST)
    starts = [np.arange(0, len(sequence), width) for sequence in sequences]
    return [
        np.add.reduceat(sequence, start)
        / np.diff(start, append=len(sequence)).reshape(-1, *[1] * (sequence.ndim - 1))
        for sequence, start in zip(sequences, starts, strict=True)
    ]


def archive(package: str, name: str, task: str = "classify") -> Callable[[], Split]:
    """Return a loader of a set of the UCR, UEA or TSER archive, with its own split."""

    def load() -> Split:
        halves = []
        for half in ("TRAIN", "TEST"):
            path = folder_of(package, "datasets", "data", name, f"{name}_{half}.ts")
            data = rl.data.read(path, rl.data.Columns(task=task))
            series = np.split(np.asarray(data.values), data.offsets[1:-1])
            labels = list(data.labels) if task == "classify" else data.targets.values.ravel()
            halves.append((series, labels))
        (train, train_labels), (test, test_labels) = halves
        both = shortened([*train, *test])
        return Split(both[: len(train)], train_labels, both[len(train) :], test_labels)

    return load


def trace() -> Split:
    """Return the set Trace of the UCR archive, which tslearn brings."""
    arrays = np.load(folder_of("tslearn", ".cached_datasets", "Trace.npz"))
    train, test = list(arrays["X_train"]), list(arrays["X_test"])
    return Split(train, arrays["y_train"].tolist(), test, arrays["y_test"].tolist())


def watch() -> Split:
    """Return seglearn's recordings of seven exercises; every third one is for the test."""
    path = folder_of("seglearn", "data", "watch_dataset.npy")
    data = np.load(path, allow_pickle=True).item()
    series, labels = shortened(list(data["X"])), data["y"].tolist()
    return _every_third(series, labels)


def digits() -> Split:
    """Return scikit-learn's images of digits, eight rows of eight; the test begins at 1,000."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = list((images.reshape(-1, 8, 8) / 16).astype(np.float32))
    return Split(rows[:1000], labels[:1000].tolist(), rows[1000:], labels[1000:].tolist())


def order_of_marks() -> Split:
    """Draw noise of 20 to 80 steps with two marks; the class is which of four orders they have."""
    rng = np.random.default_rng(1)
    series, labels = [], []
    for _ in range(600):
        steps = rng.normal(0, 0.3, (rng.integers(20, 81), 3)).astype(np.float32)
        first, second = rng.integers(2, size=2)
        middle = len(steps) // 2
        steps[rng.integers(middle), first] += 2
        steps[rng.integers(middle, len(steps)), second] += 2
        series.append(steps)
        labels.append(f"{first}{second}")
    return _every_third(series, labels)


def _chains(count: int, symbols: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.dirichlet(np.full(symbols, 0.5), symbols) for _ in range(count)]


def _walk(chain: np.ndarray, steps: int, rng: np.random.Generator) -> list[int]:
    symbols = [int(rng.integers(len(chain)))]
    while len(symbols) < steps:
        symbols.append(int(rng.choice(len(chain), p=chain[symbols[-1]])))
    return symbols


def texts() -> Split:
    """Draw words of 6 to 30 letters from one of four Markov chains, which is the class."""
    rng = np.random.default_rng(2)
    chains = _chains(4, 12, rng)
    series, labels = [], []
    for _ in range(900):
        label = int(rng.integers(4))
        letters = _walk(0.5 * chains[label] + 0.5 / 12, int(rng.integers(6, 31)), rng)
        series.append(["abcdefghijkl"[letter] for letter in letters])
        labels.append(f"chain {label}")
    return _every_third(series, labels)


def frequency() -> Split:
    """Draw sines with noise of 20 to 80 steps; the target is the frequency."""
    rng = np.random.default_rng(3)
    series, targets = [], []
    for _ in range(450):
        target = rng.uniform(0.02, 0.2)
        steps = np.arange(rng.integers(20, 81))
        wave = np.sin(2 * np.pi * (target * steps + rng.uniform()))
        series.append((wave + rng.normal(0, 0.5, len(steps))).astype(np.float32)[:, None])
        targets.append(100 * target)
    return _every_third(series, targets)


def area() -> Split:
    """Draw walks of 10 to 60 steps; the target is the sum of their positive parts."""
    rng = np.random.default_rng(4)
    series, targets = [], []
    for _ in range(450):
        walk = rng.normal(0, 1, rng.integers(10, 61)).cumsum().astype(np.float32)
        targets.append(float(walk.clip(min=0).sum()))
        series.append((walk + rng.normal(0, 0.3, len(walk)).astype(np.float32))[:, None])
    return _every_third(series, targets)


def last_peak() -> Split:
    """Draw noise of 20 to 80 steps with peaks; the target is the height of the last one."""
    rng = np.random.default_rng(5)
    series, targets = [], []
    for _ in range(450):
        steps = rng.normal(0, 0.3, rng.integers(20, 81)).astype(np.float32)
        places = np.sort(rng.choice(len(steps), 3, replace=False))
        heights = rng.uniform(2, 6, 3)
        steps[places] += heights
        series.append(steps[:, None])
        targets.append(float(heights[-1]))
    return _every_third(series, targets)


def hidden_states() -> Split:
    """Draw numbers of 10 to 60 steps from a hidden Markov model; the tags are its states."""
    rng = np.random.default_rng(6)
    chain = 0.85 * np.eye(4) + 0.15 * _chains(1, 4, rng)[0]
    means = rng.normal(0, 1, (4, 2))
    series, tags = [], []
    for _ in range(300):
        states = _walk(chain, int(rng.integers(10, 61)), rng)
        series.append((means[states] + rng.normal(0, 1, (len(states), 2))).astype(np.float32))
        tags.append([f"state {state}" for state in states])
    return _every_third(series, tags)


def depths() -> Split:
    """Draw brackets of 10 to 40 symbols; the tag of each is how deep it stands, at most 4."""
    rng = np.random.default_rng(7)
    series, tags = [], []
    for _ in range(300):
        depth, symbols, depths_of = 0, [], []
        for _ in range(int(rng.integers(10, 41))):
            opens = depth == 0 or (depth < 4 and rng.random() < 0.5)
            depth += 1 if opens else -1
            symbols.append("(" if opens else ")")
            depths_of.append(f"depth {depth}")
        series.append(symbols)
        tags.append(depths_of)
    return _every_third(series, tags)


def next_marks() -> Split:
    """Draw letters of 10 to 40 steps; the tag of each is whether a vowel follows within three."""
    rng = np.random.default_rng(8)
    series, tags = [], []
    for _ in range(300):
        letters = ["abcdefgh"[i] for i in rng.integers(8, size=rng.integers(10, 41))]
        follows = [bool({"a", "e"} & set(letters[i + 1 : i + 4])) for i in range(len(letters))]
        series.append(letters)
        tags.append(["soon" if each else "not" for each in follows])
    return _every_third(series, tags)


def _series(values: Sequence[np.ndarray], horizon: int) -> Split:
    """Return series as tables of ids, times and values; a forecast is of their last elements."""
    scale = float(np.concatenate(values).std())

    def table(parts: Sequence[np.ndarray]) -> pa.Table:
        lengths = [len(part) for part in parts]
        return pa.table(
            {
                "id": np.repeat(np.arange(len(parts)), lengths),
                "time": np.concatenate([np.arange(length) for length in lengths]),
                "value": np.concatenate(parts) / scale,
            }
        )

    return Split(table([part[:-horizon] for part in values]), None, table(values), None, horizon)


def one_series(package: str, path: str, column: str, horizon: int) -> Callable[[], Split]:
    """Return a loader of a column of a file of a package, a series."""

    def load() -> Split:
        table = pyarrow.csv.read_csv(folder_of(package, "datasets", *path.split("/")))
        return _series([table[column].to_numpy().astype(np.float64)], horizon)

    return load


def el_nino() -> Split:
    """Return temperatures of the Pacific of 61 years, a row of twelve months each."""
    table = pyarrow.csv.read_csv(folder_of("statsmodels", "datasets", "elnino", "elnino.csv"))
    months = np.stack([column.to_numpy() for column in table.columns[1:]], 1)
    return _series([months.ravel().astype(np.float64)], 24)


def fertility() -> Split:
    """Return births per woman of 192 countries from 1960 to 2011, without gaps."""
    path = folder_of("statsmodels", "datasets", "fertility", "fertility.csv")
    years = [str(year) for year in range(1960, 2012)]
    table = pyarrow.csv.read_csv(path).select(years)
    rows = np.stack([column.cast(pa.float64()).to_numpy() for column in table.columns], 1)
    return _series(list(rows[~np.isnan(rows).any(1)]), 5)


def waves() -> Split:
    """Draw 60 autoregressive series of 60 to 120 steps with periods of 6 to 20 steps."""
    rng = np.random.default_rng(9)
    drawn = []
    for _ in range(60):
        turn = 2 * np.pi / rng.uniform(6, 20)
        wave = list(rng.normal(size=2))
        for _ in range(int(rng.integers(58, 119))):
            wave.append(1.9 * np.cos(turn) * wave[-1] - 0.9025 * wave[-2] + 0.3 * rng.normal())
        drawn.append(np.array(wave))
    return _series(drawn, 10)


def sentences() -> Split:
    """Return first lines of docstrings of the standard library, of 20 to 80 characters."""
    found = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add((ast.get_docstring(node) or "").partition("\n")[0])
    texts = sorted(text for text in found if 20 <= len(text) <= 80)
    np.random.default_rng(10).shuffle(texts)
    return _texts([list(text) for text in texts[:1500]])


def letters() -> Split:
    """Draw texts of 20 to 60 letters, each of which depends on the two before it."""
    rng = np.random.default_rng(11)
    chances = rng.dirichlet(np.full(12, 0.1), (12, 12))
    drawn = []
    for _ in range(900):
        text = list(rng.integers(12, size=2))
        for _ in range(int(rng.integers(18, 59))):
            text.append(rng.choice(12, p=chances[text[-2], text[-1]]))
        drawn.append("".join("abcdefghijkl"[letter] for letter in text))
    return _texts(drawn)


def echoes() -> Split:
    """Draw words of 4 to 12 letters that are repeated after a hyphen."""
    rng = np.random.default_rng(12)
    words = [
        "".join("abcdefgh"[i] for i in rng.integers(8, size=rng.integers(4, 13)))
        for _ in range(900)
    ]
    return _texts([f"{word}-{word}" for word in words])


def _texts(texts: list[str]) -> Split:
    split = _every_third(texts, texts)
    return Split(split.train, None, split.test, None)


def _every_third(series: list[Any], labels: list[Any]) -> Split:
    is_test = [index % 3 == 2 for index in range(len(series))]

    def part(values: list[Any], chosen: bool) -> list[Any]:
        return [value for value, test in zip(values, is_test, strict=True) if test is chosen]

    return Split(part(series, False), part(labels, False), part(series, True), part(labels, True))


SETS: dict[str, dict[str, Callable[[], Split]]] = {
    "classify": {
        "BasicMotions": archive("sktime", "BasicMotions"),
        "PickupGesture": archive("aeon", "PickupGestureWiimoteZ"),
        "PLAID": archive("sktime", "PLAID"),
        "ACSF1": archive("sktime", "ACSF1"),
        "GunPoint": archive("sktime", "GunPoint"),
        "ItalyPowerDemand": archive("sktime", "ItalyPowerDemand"),
        "OSULeaf": archive("sktime", "OSULeaf"),
        "Trace": trace,
        "watch": watch,
        "digits": digits,
        "order of marks": order_of_marks,
        "texts": texts,
    },
    "regress": {
        "Covid3Month": archive("sktime", "Covid3Month", "regress"),
        "frequency": frequency,
        "area": area,
        "last peak": last_peak,
    },
    "tag": {"hidden states": hidden_states, "depths": depths, "next marks": next_marks},
    "forecast": {
        "sunspots": one_series("statsmodels", "sunspots/sunspots.csv", "SUNACTIVITY", 24),
        "El Nino": el_nino,
        "equipment": one_series("statsmodels", "elec_equip/elec_equip.csv", ORDERS, 24),
        "seat belts": one_series("sktime", "data/seatbelts/seatbelts.csv", "KSI", 24),
        "fertility": fertility,
        "waves": waves,
    },
    "language": {"sentences": sentences, "letters": letters, "echoes": echoes},
}
