"""A voice activity detector for live calls: is there a voice in each frame of 32 ms?

The network has the shape of Silero's: a short-time Fourier transform as a product, four
convolutions inside a frame and the end of the previous one, an LSTM of 128, and a head. It reads
512 samples at a time, at 16 kHz.

It is trained on recorded prompts and digits and on synthetic voices, with generated noise. The
voices of the test part are others: synthetic ones, and the recorded speakers of other languages
that are installed. Install the data with

    apt install asterisk-core-sounds-en-wav asterisk-core-sounds-fr-wav espeak-ng

    python examples/voice_activity.py --weights detector.pt

The test part is served as live streams by one engine, in pieces of random lengths, and compared
with whole sequences. With the extra ``serve``, the detector is a server, and a call is a WebSocket,
to which a file is sent in real time:

    python examples/voice_activity.py --weights detector.pt --serve 8000  # also a page at
    http://127.0.0.1:8000 python examples/voice_activity.py --call 127.0.0.1:8000 call.wav

Balanced accuracy of the frames of new voices: 0.939 (0.5 for a constant answer).
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import subprocess
import tempfile
import time
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.serve import Engine

RATE, FRAME, CONTEXT, WINDOW = 16_000, 512, 64, 256
SOUNDS = Path("/usr/share/asterisk/sounds")
TRAIN_VOICES = ("en+m1", "en+m2", "en+m3", "en+m4", "en+f1", "en+f2", "en+f3")
TEST_VOICES = ("en+m7", "en+f5", "en-us+m5")
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "One two three four five six seven eight nine ten.",
    "Please leave your message after the tone, and press hash when you have finished.",
    "She sells sea shells on the sea shore.",
    "How much wood would a woodchuck chuck?",
    "Your call is important to us. An agent will answer shortly.",
)


class Front(nn.Module):
    """A cell: the features of a frame. Its state is the end of the previous frame."""

    input_size, hidden_size, output_size = FRAME, CONTEXT, 128

    def __init__(self) -> None:
        super().__init__()
        turns = torch.outer(torch.arange(WINDOW // 2 + 1.0), torch.arange(WINDOW)) * (
            2 * math.pi / WINDOW
        )
        self.register_buffer(
            "waves", torch.cat([turns.cos(), turns.sin()]) * torch.hann_window(WINDOW)
        )
        sizes, strides = (WINDOW // 2 + 1, 128, 64, 64, 128), (1, 2, 2, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, after, 3, stride=stride, padding=1)
            for before, after, stride in zip(sizes, sizes[1:], strides, strict=False)
        )

    def step(self, samples: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features ``(R, 128)`` of frames ``(R, 512)``, and the ends of the frames."""
        # The end is reflected, so that there are four windows.
        whole = torch.cat([context, samples, samples[:, -CONTEXT - 1 : -1].flip(1)], 1)
        products = nn.functional.linear(
            whole.unfold(1, WINDOW, WINDOW // 2), self.get_buffer("waves")
        )
        real, imaginary = products.split(WINDOW // 2 + 1, 2)
        out = (real.square() + imaginary.square() + 1e-8).sqrt().transpose(1, 2)
        for convolution in self.convolutions:
            out = convolution(out).relu()
        return out.flatten(1), samples[:, -CONTEXT:]


class Detector(nn.Module):
    """The log-odds of a voice, one per frame."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.layer, self.head = (
            rl.nn.Recurrent(Front()),
            rl.nn.LSTM(128, 128),
            nn.Linear(128, 1),
        )

    def forward(self, frames: rl.Ragged) -> rl.Ragged:
        out, _ = self.layer(self.front(frames)[0])
        return out.map(lambda rows: self.head(rows.relu()))


def read(path: Path) -> Tensor:
    """Return the samples of a file, at 16 kHz and with an amplitude of 1."""
    with wave.open(str(path)) as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
        rate = file.getframerate()
    if not len(data):
        return torch.zeros(0)
    samples = torch.from_numpy(data)
    count = len(samples) * RATE // rate
    samples = nn.functional.interpolate(samples[None, None], count, mode="linear")[0, 0]
    return samples / samples.abs().max().clamp(min=1)


def recorded(folder: Path) -> list[Tensor]:
    """Return the recordings of a speaker, of at least half a second."""
    return [
        samples for path in sorted(folder.rglob("*.wav")) if len(samples := read(path)) > RATE // 2
    ]


def spoken(voices: Sequence[str]) -> list[Tensor]:
    """Return sentences by voices of espeak-ng."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "speech.wav")
        for voice in voices:
            for sentence in SENTENCES:
                subprocess.run(["espeak-ng", "-v", voice, "-w", str(path), sentence], check=True)
                found.append(read(path))
    return found


def noise(count: int) -> Tensor:
    """Return noise with a random colour, and the hum and beeps of machines."""
    spectrum = torch.fft.rfft(torch.randn(count))
    spectrum *= torch.arange(1, len(spectrum) + 1).pow(-random.uniform(0, 1))
    made = torch.fft.irfft(spectrum, count)
    made = made / made.std()
    times = torch.arange(count) / RATE
    for _ in range(random.randrange(3)):
        tone = (2 * math.pi * random.uniform(50, 2000) * times).sin()
        made += random.random() * tone * ((times * random.uniform(0.1, 3)) % 1 < random.random())
    scaled: Tensor = made / made.std()
    return scaled


def example(speech: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return frames ``(n, 512)`` of recordings with pauses and noise, and the frames ``(n,)`` that
    have a voice.
    """
    parts = []
    for _ in range(random.randint(1, 3)):
        own = random.choice(speech)[: 4 * RATE]
        parts += [torch.zeros(int(RATE * random.uniform(0.2, 1.5))), own]
    clean = torch.cat([*parts, torch.zeros(int(RATE * random.uniform(0.2, 1.5)))])
    clean = clean[: len(clean) // FRAME * FRAME]
    level = clean.reshape(-1, FRAME).square().mean(1).sqrt()
    voiced = level > 0.03 * level.max()
    # Pauses within a word are a part of it.
    around = nn.functional.max_pool1d(voiced.float()[None], 5, 1, 2)
    voiced = -nn.functional.max_pool1d(-around, 5, 1, 2)[0]
    ratio = 10 ** (random.uniform(0, 25) / 20)
    mixed = clean + noise(len(clean)) * clean[clean != 0].std() / ratio
    mixed *= random.uniform(0.05, 1) / mixed.abs().max()
    return mixed.reshape(-1, FRAME), voiced


def train(model: Detector, speech: Sequence[Tensor], steps: int, count: int = 16) -> None:
    """Train on new mixtures at every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        frames, voiced = zip(*[example(speech) for _ in range(count)], strict=True)
        out = model(rl.Ragged(list(frames)))
        loss = nn.functional.binary_cross_entropy_with_logits(out[..., 0], rl.Ragged(voiced))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def live(engine: Engine, calls: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of calls that are served at the same time, in pieces of random lengths."""
    streams, left = [engine.open() for _ in calls], [iter(pieces(call)) for call in calls]
    outputs: list[list[Tensor]] = [[] for _ in calls]
    while True:
        for stream, more in zip(streams, left, strict=True):
            stream.push(next(more, torch.zeros(0, FRAME)))
        if not engine.step():
            break
        for stream, out in zip(streams, outputs, strict=True):
            out.append(stream.pull())
    for stream in streams:
        stream.close()
    return [torch.cat(out) for out in outputs]


def pieces(call: Tensor) -> Iterator[Tensor]:
    """Yield 1 to 4 frames at a time."""
    while len(call):
        count = random.randint(1, 4)
        yield call[:count]
        call = call[count:]


def spans(voiced: Tensor) -> list[str]:
    """Return the parts of a call with a voice, ``(n,)`` bools of frames, in seconds."""
    edges = (
        torch.cat([torch.zeros(1), voiced.float(), torch.zeros(1)]).diff().nonzero()[:, 0]
        * FRAME
        / RATE
    )
    return [f"{begin:.2f} to {end:.2f} s" for begin, end in edges.reshape(-1, 2).tolist()]


def call(address: str, path: Path) -> Tensor:
    """Send a file to a server in real time, as a call would come; return the log-odds of its
    frames.
    """
    from websockets.sync.client import connect

    samples = read(path)
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    answers, longest, begun = [], 0.0, time.perf_counter()
    with connect(f"ws://{address}/stream?answers=binary") as socket:
        for place, frame in enumerate(frames):
            # A frame is complete when its last sample is.
            time.sleep(max(0.0, begun + (place + 1) * FRAME / RATE - time.perf_counter()))
            sent = time.perf_counter()
            socket.send(frame.numpy().tobytes())
            answers.append(np.frombuffer(bytes(socket.recv()), np.float32))
            longest = max(longest, time.perf_counter() - sent)
            print("#" if answers[-1] > 0 else ".", end="", flush=True)
    found = torch.from_numpy(np.concatenate([*answers, np.zeros(0, np.float32)]))
    print(
        f"\nvoice: {', '.join(spans(found > 0)) or 'none'}; slowest answer {1e3 * longest:.1f} ms"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, serve the test part, and return the balanced accuracy of its frames; or the share with
    voice of a call.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sounds", type=Path, default=SOUNDS, help=f"folder of recordings (default: {SOUNDS})"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument(
        "--calls", type=int, default=64, help="live calls of the test part (default: 64)"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="file of the trained detector; it is written if it does not exist",
    )
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="serve the detector at this port afterwards"
    )
    parser.add_argument(
        "--call", nargs=2, metavar=("HOST:PORT", "WAV"), help="only send a file to a server"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and mixtures (default: 0)")
    options = parser.parse_args(arguments)
    if options.call is not None:
        return float((call(options.call[0], Path(options.call[1])) > 0).float().mean())
    random.seed(options.seed)
    torch.manual_seed(options.seed)

    has_voices = shutil.which("espeak-ng") is not None
    speakers = sorted(options.sounds.iterdir()) if options.sounds.is_dir() else []
    english = [folder for folder in speakers if folder.name.startswith("en")]
    others = [folder for folder in speakers if not folder.name.startswith("en")]
    if not english or not (has_voices or others):
        parser.error(
            "no recordings: run apt install asterisk-core-sounds-en-wav asterisk-core-sounds-fr-wav espeak-ng"
        )
    speech = [samples for folder in english for samples in recorded(folder)]
    speech += spoken(TRAIN_VOICES) if has_voices else []
    new = [samples for folder in others for samples in recorded(folder)]
    new += spoken(TEST_VOICES) if has_voices else []
    print(f"{len(speech)} recordings to train on, {len(new)} of other voices to test")

    model = Detector()
    if options.weights is not None and options.weights.exists():
        model.load_state_dict(torch.load(options.weights))
    else:
        train(model, speech, options.steps)
        if options.weights is not None:
            torch.save(model.state_dict(), options.weights)
    engine = Engine(model.eval(), max_streams=max(1000, options.calls), feature_shape=FRAME)
    calls, voiced = zip(*[example(new) for _ in range(options.calls)], strict=True)
    served = live(engine, calls)
    whole = engine.run(rl.Ragged(list(calls)))
    is_equal = all(torch.equal(one, other) for one, other in zip(served, whole, strict=True))
    print(f"{len(calls)} live calls, {whole.numel()} frames: equal to whole sequences: {is_equal}")
    found, right = whole.squeeze(-1) > 0, rl.Ragged(list(voiced)) > 0
    hits = found[right].float().mean().item()
    rejections = (~found[~right]).float().mean().item()
    accuracy = (hits + rejections) / 2
    print(f"frames with a voice found: {hits:.3f}; frames without one rejected: {rejections:.3f}")
    print(f"balanced accuracy of new voices {accuracy:.4f}")
    if options.serve is not None:
        import uvicorn

        from raglane.serve.app import create_app, settings

        app = create_app({"voice": engine})
        uvicorn.run(app, port=options.serve, **settings(app))
    return accuracy


if __name__ == "__main__":
    main()
