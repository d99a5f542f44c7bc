"""Live streams (``raglane.serve``): steps against ONNX Runtime and torch, real-time clients,
memory, and bits.

    python benchmarks/serving.py times --threads 1 > benchmarks/results/serving.md python
    benchmarks/serving.py times clients memory churn bits --threads 2 >>
    benchmarks/results/serving.md

The voice model is the detector of examples/voice_activity.py: 16 kHz, frames of 512 samples, 0.68
million multiply-adds. With one thread the process is pinned to one processor. A time includes
giving the frames and reading the answers. ``times`` requires ``pip install '.[bench]' onnxscript``.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.timing import interleave
from torch import Tensor, nn

import raglane as rl
from raglane.planner.machine import cpu_name
from raglane.serve import Engine, Stream

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from voice_activity import CONTEXT, FRAME, Detector

PERIOD = FRAME / 16_000  # seconds from frame to frame
COUNTS = (1, 64, 1000)
STATES = (CONTEXT, 128, 128)


class Plain(nn.Module):
    """One step of the detector in torch."""

    def __init__(self, model: Detector) -> None:
        super().__init__()
        self.front: Any = model.front.cells[0]
        self.head, self.layer = model.head, nn.LSTM(128, 128)
        self.layer.load_state_dict(model.layer.state_dict())

    def forward(
        self, samples: Tensor, context: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        features, context = self.front.step(samples, context)
        out, (h, c) = self.layer(features.unsqueeze(0), (h.unsqueeze(0), c.unsqueeze(0)))
        return self.head(out[0].relu()), context, h[0], c[0]


def onnx_session(model: Detector, threads: int) -> Any:
    """Return the step as a session of ONNX Runtime."""
    import onnxruntime

    given = tuple(torch.randn(2, size) for size in (FRAME, *STATES))
    batch = torch.export.Dim("batch")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        names = ["samples", "context", "h", "c"]
        axes: Any = {name: {0: batch} for name in names}
        torch.onnx.export(
            Plain(model).eval(),
            given,
            path,
            input_names=names,
            dynamic_shapes=axes,
            dynamo=True,
            verbose=False,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = (
            threads,
            1,
            4,
        )
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Ways:
    """The ways to run one frame of each stream; all keep their states from call to call."""

    def __init__(self, model: Detector, count: int, threads: int, session: Any) -> None:
        self.engine = Engine(model, slots=count, features=FRAME, threads=threads)
        self.streams = [self.engine.open() for _ in range(count)]
        self.frames = torch.randn(count, FRAME)
        self.parts = list(self.frames.split(1))
        self.arrays = [part.numpy() for part in self.parts]
        self.session, self.plain = session, Plain(model).eval()
        self.stacked: list[Any] = [np.zeros((count, size), np.float32) for size in STATES]
        self.single: list[list[Any]] = [
            [np.zeros((1, size), np.float32) for size in STATES] for _ in range(count)
        ]
        self.torch_stacked: list[Any] = [torch.zeros(count, size) for size in STATES]
        self.torch_single: list[list[Any]] = [
            [torch.zeros(1, size) for size in STATES] for _ in range(count)
        ]

    def ours(self) -> Any:
        for stream, part in zip(self.streams, self.arrays, strict=True):
            stream.push(part)
        self.engine.step()
        return [stream.pull() for stream in self.streams]

    def ours_together(self) -> Any:
        self.engine.push(self.streams, np.concatenate(self.arrays))
        self.engine.step()
        return self.engine.pull(self.streams).split(1)

    def _run(self, frames: Any, states: list[Any]) -> list[Any]:
        given = dict(zip(("samples", "context", "h", "c"), (frames, *states), strict=True))
        found: list[Any] = self.session.run(None, given)
        return found

    def onnx_per_stream(self) -> Any:
        answers = []
        for place, frames in enumerate(self.arrays):
            answer, *self.single[place] = self._run(frames, self.single[place])
            answers.append(answer)
        return answers

    def onnx_stacked(self) -> Any:
        """States stay stacked, which requires that the same streams are ready at every step."""
        answer, *self.stacked = self._run(np.concatenate(self.arrays), self.stacked)
        return np.split(answer, len(self.arrays))

    def onnx_restacked(self) -> Any:
        """The scheme of sherpa-onnx: stack the states of the ready streams, and unstack them
        afterwards.
        """
        states = [np.concatenate(parts) for parts in zip(*self.single, strict=True)]
        answer, *after = self._run(np.concatenate(self.arrays), states)
        self.single = [
            list(parts)
            for parts in zip(*(np.split(part, len(self.arrays)) for part in after), strict=True)
        ]
        return np.split(answer, len(self.arrays))

    @torch.inference_mode()
    def torch_per_stream(self) -> Any:
        answers = []
        for place, frames in enumerate(self.parts):
            answer, *self.torch_single[place] = self.plain(frames, *self.torch_single[place])
            answers.append(answer)
        return answers

    @torch.inference_mode()
    def torch_in_one(self) -> Any:
        answer, *self.torch_stacked = self.plain(torch.cat(self.parts), *self.torch_stacked)
        return answer.split(1)

    def all(self) -> dict[str, Callable[[], Any]]:
        found: dict[str, Callable[[], Any]] = {
            "ours": self.ours,
            "onnx, per stream": self.onnx_per_stream,
        }
        if len(self.streams) > 1:
            found["ours, together"] = self.ours_together
            found |= {"onnx, stacked": self.onnx_stacked, "onnx, restacked": self.onnx_restacked}
            found["torch, stacked"] = self.torch_in_one
        found["torch, per stream"] = self.torch_per_stream
        return found

    def check(self) -> float:
        """Return the largest difference of an answer to ours; NaN if there is one."""
        own, ways = torch.cat(self.ours()), self.all()
        # Others continue the states of one of these.
        others = [
            way
            for name, way in ways.items()
            if name not in ("ours", "ours, together", "onnx, restacked")
        ]
        found = [torch.cat([torch.as_tensor(part) for part in way()]) for way in others]
        return max(float((part - own).abs().max()) for part in found)


def times(threads: int) -> None:
    print(
        f"Time per stream of one frame of each, us, {threads} threads. Ratios: the other's time over ours.\n"
    )
    print("| ready | step alone | way | us per stream | ratio |\n| --- | --- | --- | --- | --- |")
    model = Detector().eval()
    session = onnx_session(model, threads)
    for count in COUNTS:
        ways = Ways(model, count, threads, session)
        assert ways.check() < 1e-4, "the answers differ"
        samples = interleave(ways.all(), 15, most_seconds=12)
        step = ways.engine.stats()["step_ms"]["p50"] * 1e3 / count
        for name, own in samples.items():
            ratio = statistics.median(
                other / ours for other, ours in zip(own, samples["ours"], strict=True)
            )
            alone = f"{step:.1f}" if name == "ours" else ""
            print(
                f"| {count} | {alone} | {name} | {1e6 * statistics.median(own) / count:.1f} | {ratio:.2f} |"
            )


# ---- real-time clients ---------------------------------------------------------------------------


# A frame that a client sends; the answer is its stream.
RECORD = np.dtype([("stream", np.int32), ("frame", np.float32, FRAME)])
MOST = 256  # records that are read, or sent, at a time


def serve(connection: socket.socket, streams: list[Stream], engine: Engine) -> tuple[int, int]:
    """Serve the clients of another process until it sends no more; return ready streams, and those
    taken.
    """
    memory = bytearray(MOST * RECORD.itemsize)
    of, taken, held = 0, 0, 0
    while count := connection.recv_into(memoryview(memory)[held:]):
        held += count
        records = np.frombuffer(memory, RECORD, held // RECORD.itemsize)
        if not len(records):
            continue
        # A stream may have sent several frames.
        groups, left = [], np.arange(len(records))
        while len(left):
            first = np.unique(records["stream"][left], return_index=True)[1]
            groups.append([streams[place] for place in records["stream"][left[first]].tolist()])
            engine.push(groups[-1], records["frame"][left[first]])
            left = np.delete(left, first)
        of += len(groups[0])
        taken += engine.step()
        for group in groups:
            engine.pull(group)
        connection.sendall(records["stream"].tobytes())
        whole = len(records) * RECORD.itemsize
        memory[: held - whole] = memory[whole:held]
        held -= whole
    return of, taken


def clients(connection: socket.socket, pipe: Any, count: int, seconds: float) -> None:
    """Push a frame of each client every 32 ms; send the latencies, the late ones and the time of
    the processor.
    """
    rng = np.random.default_rng(0)
    records = np.zeros(MOST, RECORD)
    records["frame"] = rng.standard_normal((MOST, FRAME), np.float32)
    due = time.perf_counter() + 0.1 + rng.random(count) * PERIOD
    end = due.min() + seconds
    waiting: list[deque[float]] = [deque() for _ in range(count)]
    latencies: list[float] = []
    busy, left = time.process_time(), 0
    while (now := time.perf_counter()) < end or left:
        places = np.flatnonzero(due <= now)[:MOST] if now < end else np.empty(0, np.int64)
        if len(places):
            # From the time at which the frame is pushed.
            for place in places.tolist():
                waiting[place].append(now)
            due[places] += PERIOD
            records["stream"][: len(places)] = places
            connection.setblocking(True)
            connection.sendall(records[: len(places)])
            left += len(places)
        # Coarser ticks cost clients less time of the processor.
        connection.settimeout(max(0.0005, due.min() - time.perf_counter()) if now < end else 1.0)
        with suppress(TimeoutError):
            answers = np.frombuffer(connection.recv(4 * MOST), np.int32).tolist()
            now = time.perf_counter()
            latencies += [now - waiting[place].popleft() for place in answers]
            left -= len(answers)
    connection.close()
    own = np.array(latencies)
    late = int((own > PERIOD).sum())
    facts = (
        len(own),
        float(np.percentile(own, 50)),
        float(np.percentile(own, 99)),
        float(own.max()),
        late,
    )
    pipe.send((*facts, time.process_time() - busy))


def trial(model: Detector, count: int, seconds: float, threads: int) -> tuple[Any, ...]:
    """Return the facts of the clients, the server's time of a processor, the streams and the share
    of a step.
    """
    engine = Engine(model, slots=count, features=FRAME, threads=threads)
    streams = [engine.open() for _ in range(count)]
    facts, sent = get_context("spawn").Pipe(duplex=False)
    ours, theirs = socket.socketpair()
    process = get_context("spawn").Process(target=clients, args=(theirs, sent, count, seconds))
    process.start()
    theirs.close()
    busy = time.process_time()
    of, taken = serve(ours, streams, engine)
    busy = time.process_time() - busy
    found = facts.recv()
    process.join()
    stats = engine.stats()
    return (*found, busy, stats["frames"] / stats["steps"], taken / of, stats["step_ms"]["p50"])


def real_time(threads: int, seconds: float) -> None:
    model = Detector().eval()
    ways = Ways(model, 200, threads, None)
    ways.ours()
    count = int(PERIOD / (statistics.median(interleave({"ours": ways.ours}, 5)["ours"]) / 200))
    print(
        f"Real-time clients in another process, a frame per 32 ms each, {threads} threads of the engine.\n"
    )
    columns = "clients | seconds | p50, ms | p99, ms | most, ms | late | CPU of the server | of the clients"
    columns += " | streams/step | share of the ready | step, ms"
    print(f"| {columns} |\n| {' | '.join(['---'] * 11)} |")

    def row(count: int, seconds: float) -> float:
        sent, middle, high, most, late, theirs, busy, size, share, step = trial(
            model, count, seconds, threads
        )
        figures = " | ".join(f"{1e3 * each:.1f}" for each in (middle, high, most))
        shares = f"{late} of {sent} | {busy / seconds:.2f} | {theirs / seconds:.2f} | {size:.1f} | {share:.2f}"
        print(f"| {count} | {seconds:g} | {figures} | {shares} | {step:.2f} |", flush=True)
        return float(high)

    while row(count, 3) > PERIOD and count > 10:
        count = int(0.9 * count)
    row(int(0.8 * count), seconds)


# ---- memory, time to open, bits ------------------------------------------------------------------


def resident() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(count: int = 100_000) -> None:
    engine = Engine(rl.nn.LSTM(40, 128).eval(), slots=count)
    frame = torch.randn(1, 40)

    def fill(number: int) -> list[Stream]:
        streams = [engine.open() for _ in range(number)]
        for stream in streams:
            stream.push(frame)
        engine.step()
        for stream in streams:
            stream.pull()
        return streams

    kept = fill(1000)
    gc.collect()
    before = resident()
    for _ in range(count // 1000 - 1):
        kept += fill(1000)
    gc.collect()
    bytes_each = (resident() - before) / (count - 1000)
    print(
        f"Resident memory per open stream of an LSTM 128, at {count} streams: {bytes_each:.0f} bytes.\n"
    )


def churn(count: int) -> None:
    frame = torch.randn(1, 40)
    for slots in (100, 100_000):
        engine = Engine(rl.nn.LSTM(40, 128).eval(), slots=slots)
        others = [engine.open() for _ in range(slots - 1)]
        spent = np.zeros((10_000, 2))
        for place in range(len(spent)):
            begun = time.perf_counter()
            stream = engine.open()
            opened = time.perf_counter()
            stream.close()
            spent[place] = opened - begun, time.perf_counter() - opened
        one, other = 1e6 * np.median(spent, 0)
        print(
            f"{slots} slots, {len(others)} other streams: open {one:.1f} us, close {other:.1f} us."
        )
    engine = Engine(rl.nn.LSTM(40, 128).eval(), slots=1000)

    def stepped() -> None:
        with engine.open() as stream:
            stream.push(frame)
            engine.step()

    for _ in range(10_000):  # until the statistics have the most entries that they keep
        stepped()
    before = resident()
    for _ in range(count // 100):
        stepped()
        for _ in range(99):
            engine.open().close()
    grown = (resident() - before) / 1024
    print(
        f"\nGrowth of resident memory over {count:,} opened and closed streams: {grown:.0f} kB.\n"
    )


def bits(threads: int, frames: int, seed: int) -> None:
    rng, model, off, seen = np.random.default_rng(seed), Detector().eval(), 0, 0
    engine = Engine(model, slots=100, features=FRAME, threads=threads, chunk=5)
    whole = Engine(model, slots=1, features=FRAME, threads=1)
    while seen < frames:
        calls = [torch.randn(int(length), FRAME) for length in rng.integers(50, 150, 100)]
        streams, at = [engine.open() for _ in calls], [0] * len(calls)
        found: list[list[Tensor]] = [[] for _ in calls]
        while any(
            stream.queued or place < len(call)
            for stream, place, call in zip(streams, at, calls, strict=True)
        ):
            for place in rng.permutation(100)[: rng.integers(1, 100)].tolist():
                count = int(rng.integers(0, 9))
                streams[place].push(calls[place][at[place] : at[place] + count])
                at[place] = min(at[place] + count, len(calls[place]))
            engine.step()
            for stream, parts in zip(streams, found, strict=True):
                parts.append(stream.pull())
        for stream in streams:
            stream.close()
        served, expected = (
            torch.cat([torch.cat(parts) for parts in found]),
            whole.run(rl.Ragged(calls)).values,
        )
        off += int((served != expected).any(1).sum())
        seen += len(expected)
    print(f"Served = offline: {off} of {seen} frames of the voice model differ in any bit.\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("times", "clients", "memory", "churn", "bits")
    parser.add_argument("parts", nargs="+", choices=parts, help="the measurements")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads; 1 pins the process (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="of real-time clients at 80 %% (default: 10)"
    )
    parser.add_argument(
        "--streams", type=float, default=1e6, help="opened and closed (default: 1e6)"
    )
    parser.add_argument(
        "--frames", type=float, default=1e6, help="compared with offline (default: 1e6)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and frames (default: 0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    if options.threads == 1 and "clients" not in options.parts:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"# Live streams\n\n{cpu_name()}, torch {torch.__version__}, {options.threads} threads\n")
    run: dict[str, Callable[[], None]] = {
        "times": partial(times, options.threads),
        "clients": partial(real_time, options.threads, options.seconds),
        "memory": memory,
        "churn": partial(churn, int(options.streams)),
        "bits": partial(bits, options.threads, int(options.frames), options.seed),
    }
    for part in options.parts:
        print(f"## {part.capitalize()}\n")
        run[part]()
        print(flush=True)


if __name__ == "__main__":
    main()
