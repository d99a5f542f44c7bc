"""Recognise spoken strings of digits: connectionist temporal classification (CTC) on log-mel
features.

Strings of 1 to 8 digits are joined from digits that were spoken one at a time: by voices of
espeak-ng, and recorded by a person. Pauses between digits, loudness and noise vary. The voices of
the test are not in the training data. Install the data with

    apt install asterisk-core-sounds-en-wav espeak-ng

A bidirectional LSTM reads the features, and the CTC loss needs no alignment of labels and frames.
The same network in plain PyTorch, padded and packed, is trained from the same weights on the same
batches for comparison; --transducer adds a transducer. Times are those of one processor.

    python examples/spoken_digits.py

Digit error rate of new voices: 0.053 (in PyTorch 0.053); training 18 s (68 s).
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import tempfile
import time
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl

RATE, WINDOW, HOP, BANDS = 8000, 256, 160, 32  # bands of 32 ms every 20 ms; two of them are a frame
WORDS = "zero one two three four five six seven eight nine".split()
BLANK = 10
RECORDED = Path("/usr/share/asterisk/sounds/en_US_f_Allison/digits")
TRAINING = "en+m1 en-us+m3 en+m4 en-us+m6 en+f1 en-us+f2 en+f3 en-us+f5 en-gb-scotland+m2 en-us+klatt en+edward".split()
TEST = "en-us+m5 en+m7 en-us+f4 en-gb-scotland+f3 en-029+m8".split()

Voice = list[npt.NDArray[np.float32]]
Example = tuple[Tensor, Tensor]


def read(path: Path) -> npt.NDArray[np.float32]:
    """Return the samples of a file at 8 kHz, without silence at the ends, with a root mean square
    of 1.
    """
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
        samples = faster(samples, file.getframerate() / RATE)
    loud = np.flatnonzero(np.abs(samples) > 0.03 * np.abs(samples).max())
    samples = samples[loud[0] : loud[-1] + 1]
    return samples / np.sqrt(np.mean(samples**2))


def spoken(voices: Sequence[str]) -> list[Voice]:
    """Return the ten digits by voices of espeak-ng, at two speeds."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digit.wav")
        for voice in voices:
            for speed in ("140", "190"):
                digits = []
                for word in WORDS:
                    subprocess.run(
                        ["espeak-ng", "-v", voice, "-s", speed, "-w", str(path), word], check=True
                    )
                    digits.append(read(path))
                found.append(digits)
    return found


def filters() -> npt.NDArray[np.float64]:
    """Return triangular filters of equal width on the mel scale, ``(frequencies, BANDS)``."""
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling))


def features(samples: npt.NDArray[np.float32], bank: npt.NDArray[np.float64]) -> Tensor:
    """Return log-mel features ``(T, 2 * BANDS)``, less their means over time."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP] * np.hanning(WINDOW)
    bands = np.log(np.abs(np.fft.rfft(frames)) ** 2 @ bank + 1e-3)
    bands = (bands - bands.mean(0))[: len(bands) // 2 * 2] / 3
    return torch.from_numpy(bands.astype(np.float32)).view(-1, 2 * BANDS)


def faster(samples: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.float32]:
    """Return samples that play faster, and so higher."""
    places = np.arange(0, len(samples) - 1, factor)
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)


def strings(voices: Sequence[Voice], count: int, seed: int, change: float = 0.0) -> list[Example]:
    """Return the features and the digits of strings, each by one voice, whose pitch changes by a
    random factor.
    """
    draw, bank, found = np.random.default_rng(seed), filters(), []
    for _ in range(count):
        voice, digits = (
            voices[draw.integers(len(voices))],
            draw.integers(10, size=draw.integers(1, 9)),
        )
        pause = lambda: np.zeros(int(RATE * draw.uniform(0, 0.3)), np.float32)  # noqa: E731
        pitch = np.exp(draw.uniform(-change, change))
        parts = [
            part
            for digit in digits
            for part in (pause(), draw.uniform(0.5, 1) * faster(voice[digit], pitch))
        ]
        clean = np.concatenate([*parts, pause(), np.zeros(WINDOW, np.float32)])
        noise = draw.normal(size=len(clean)) * 10 ** -draw.uniform(0.5, 1.5)
        found.append((features((clean + noise).astype(np.float32), bank), torch.from_numpy(digits)))
    return found


def digits_of(labels: Tensor) -> Tensor:
    """Return the labels of frames without repetitions and blanks."""
    changed = torch.unique_consecutive(labels)
    return changed[changed != BLANK]


class Recogniser(nn.Module):
    """A bidirectional LSTM; the log-probabilities of the digits and the blank, per frame."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = (
            rl.nn.LSTM(2 * BANDS, size, bidirectional=True),
            nn.Linear(2 * size, 11),
        )

    def forward(self, frames: rl.Ragged) -> rl.Ragged:
        log_probs: rl.Ragged = self.head(self.lstm(frames)[0]).log_softmax(-1)
        return log_probs

    def loss(self, frames: Sequence[Tensor], digits: Sequence[Tensor]) -> Tensor:
        """Return the mean CTC loss per digit."""
        return rl.transduction.ctc_loss(self(rl.Ragged(frames)), rl.Ragged(digits), BLANK)

    def read(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the digits of the most likely labels."""
        return list(rl.transduction.ctc_greedy_search(self(rl.Ragged(frames)), BLANK).best())


class Twin(nn.Module):
    """The same in PyTorch: padded, and packed for the LSTM."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2 * BANDS, size, bidirectional=True), nn.Linear(2 * size, 11)

    def forward(self, frames: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(one) for one in frames])
        out, _ = pad_packed_sequence(
            self.lstm(
                pack_padded_sequence(pad_sequence(list(frames)), lengths, enforce_sorted=False)
            )[0]
        )
        return self.head(out).log_softmax(2), lengths

    def loss(self, frames: Sequence[Tensor], digits: Sequence[Tensor]) -> Tensor:
        """Return the mean CTC loss per digit."""
        out, lengths = self(frames)
        counts = torch.tensor([len(one) for one in digits])
        return nn.functional.ctc_loss(out, torch.cat(list(digits)), lengths, counts, BLANK)

    def read(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the digits of the most likely labels."""
        out, lengths = self(frames)
        return [
            digits_of(row[:length])
            for row, length in zip(out.argmax(2).T, lengths.tolist(), strict=True)
        ]


class Transducer(nn.Module):
    """A transducer with the same encoder: the next digit also depends on the digits before it."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.lstm = rl.nn.LSTM(2 * BANDS, size, bidirectional=True)
        self.transducer = rl.transduction.Transducer(11, 2 * size, size, "gru", blank=BLANK)

    def loss(self, frames: Sequence[Tensor], digits: Sequence[Tensor]) -> Tensor:
        """Return the mean transducer loss per digit."""
        return self.transducer.loss(self.lstm(rl.Ragged(frames))[0], rl.Ragged(digits))

    def read(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the digits of the most likely emissions."""
        return list(self.transducer.decode(self.lstm(rl.Ragged(frames))[0]).best())


def batches(
    examples: Sequence[Example], seed: int, size: int = 8
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Yield the features and digits of batches in random order."""
    order = random.Random(seed).sample(range(len(examples)), len(examples))
    for begin in range(0, len(order), size):
        frames, digits = zip(
            *[examples[place] for place in order[begin : begin + size]], strict=True
        )
        yield frames, digits


def train(model: Recogniser | Twin | Transducer, examples: Sequence[Example], epochs: int) -> float:
    """Train with a learning rate that decreases to 0; return the seconds of the processor."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    begun = time.process_time()
    for epoch in range(epochs):
        total = 0.0
        for frames, digits in batches(examples, epoch):
            loss = model.loss(frames, digits)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(frames) / len(examples)
        schedule.step()
        print(f"{type(model).__name__}: epoch {epoch + 1}/{epochs}, loss {total:.3f}", flush=True)
    return time.process_time() - begun


@torch.no_grad()
def error_rate(model: Recogniser | Twin | Transducer, examples: Sequence[Example]) -> float:
    """Return the insertions, deletions and substitutions per digit."""
    frames, digits = zip(*examples, strict=True)
    return float(
        rl.transduction.edit_distance(rl.Ragged(model.eval().read(frames)), rl.Ragged(digits)).rate
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and test the networks, and return their error rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        default=RECORDED,
        help=f"folder of 0.wav to 9.wav (default: {RECORDED})",
    )
    parser.add_argument(
        "--strings", type=int, default=1000, help="strings to train on (default: 1000)"
    )
    parser.add_argument("--epochs", type=int, default=5, help="passes over them (default: 5)")
    parser.add_argument(
        "--transducer",
        action="store_true",
        help="also train a transducer, rl.transduction.Transducer",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    options = parser.parse_args(arguments)
    if shutil.which("espeak-ng") is None or not (options.recorded / "9.wav").is_file():
        parser.exit(
            2, f"{parser.prog}: no voices: run apt install asterisk-core-sounds-en-wav espeak-ng\n"
        )
    person = [read(options.recorded / f"{digit}.wav") for digit in range(10)]
    training, test = (
        strings([*spoken(TRAINING), person], options.strings, 0, 0.2),
        strings(spoken(TEST), 200, 1),
    )
    elements = sum(len(frames) for frames, _ in training)
    print(
        f"{len(training)} strings of {elements:,} frames to train on, {len(test)} of other voices to test"
    )
    torch.manual_seed(options.seed)
    models = [Recogniser(), Twin()]
    models[1].load_state_dict(models[0].state_dict())
    models += [Transducer()] if options.transducer else []
    rates = []
    for one in models:
        seconds = train(one, training, options.epochs)
        rates.append(error_rate(one, test))
        print(
            f"{type(one).__name__}: digit error rate of new voices {rates[-1]:.3f}, training {seconds:.1f} s"
        )
    return rates


if __name__ == "__main__":
    main()
