"""Live streams: ``raglane serve`` with clients in another process, and the engine alone against
ONNX Runtime and torch.

    python benchmarks/serving.py server peer long stalls reconnections > benchmarks/results/serving.md
    python benchmarks/serving.py times memory churn bits --threads 1 >> benchmarks/results/serving.md

``server`` starts the command on one processor and drives it over sockets from another one; a row
does not count if the clients took more than 70 % of theirs. ``times`` is of the engine in one
process: giving frames, a step, and reading answers, without a socket. The voice model is the
detector of examples/voice_activity.py: 16 kHz, frames of 512 samples, 0.68 million multiply-adds.
``times`` and ``peer`` require ``pip install '.[bench]' onnxscript fastapi``.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.serving import HEAD, echoed, make, most_clients, ours, peer, trial
from harness.stalls import HEAD as STALLS
from harness.stalls import read
from harness.timing import interleave
from torch import Tensor, nn
from voice_activity import CONTEXT, FRAME, Detector

import raglane as rl
from raglane.native.machine import cpu_name
from raglane.serve import Client, Engine
from raglane.streams import Stream

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


def export(model: Detector, path: Path) -> None:
    """Write the step as a file of ONNX."""
    given = tuple(torch.randn(2, size) for size in (FRAME, *STATES))
    batch = torch.export.Dim("batch")
    names = ["samples", "context", "h", "c"]
    axes: Any = {name: {0: batch} for name in names}
    torch.onnx.export(
        Plain(model).eval(), given, path, input_names=names, dynamic_shapes=axes, dynamo=True
    )


def onnx_session(model: Detector, threads: int) -> Any:
    """Return the step as a session of ONNX Runtime."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        export(model, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Ways:
    """The ways to run one frame of each stream; all keep their states from call to call."""

    def __init__(self, model: Detector, count: int, threads: int, session: Any) -> None:
        self.engine = Engine(model, max_streams=count, feature_shape=FRAME, threads=threads)
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


# ---- a server and its clients ----------------------------------------------------------------


def server(processors: tuple[int, int]) -> None:
    """Measure ``raglane serve`` on one processor with clients on another one."""
    near, far = processors
    print(f"The server on processor {near}, its clients on {far}; a frame of each per 32 ms.\n")
    print(HEAD, flush=True)
    print(echoed(200, 10, processors).text("echo"), flush=True)
    with ours(near) as served:
        print(trial(served, 200, 1, 10, far).text("ours"), flush=True)
        print(trial(served, 600, 100, 10, far).text("ours"), flush=True)
        most_clients("ours, most", served, [700, 600, 500, 400, 300, 200], 1, far)
        many = [1400, 1200, 1000, 800, 600]
        most_clients("ours, most", served, many, 100, far)


def compared(processors: tuple[int, int]) -> None:
    """Search the most clients of a few lines of FastAPI that call ONNX Runtime."""
    near, far = processors
    print(HEAD, flush=True)
    with peer(near, lambda path: export(make(), path)) as other:
        fewer = [200, 160, 130, 100, 80, 60, 40]
        most_clients("FastAPI, ONNX Runtime", other, fewer, 1, far, compares=False)


def long_run(processors: tuple[int, int], seconds: float, count: int, per_socket: int) -> None:
    """Measure a server for long, with its memory."""
    near, far = processors
    print(HEAD, flush=True)
    with ours(near) as served:
        row = trial(served, count, per_socket, seconds, far)
        print(row.text("ours"))
        memory = ", ".join(f"{size / 2**20:.0f}" for size in row.memory)
        print(f"\nResident memory of the server over time, MB: {memory}\n", flush=True)


def stalls(processors: tuple[int, int], seconds: float, count: int) -> None:
    """Print the pauses of a server's event loop above 20 ms."""
    near, far = processors
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stalls")
        with ours(near, path) as served:
            path.write_text("")
            print(HEAD)
            print(trial(served, count, 1, seconds, far).text("traced"), flush=True)
        noted = read(path)
    print(f"\n{len(noted)} stalls:\n\n{STALLS}" if noted else "\nNo stall above 20 ms.")
    for stall in sorted(noted, reverse=True):
        print(stall.text())


def reconnections(frames: int, seed: int) -> None:
    """Compare what clients receive, whose connections are lost now and then, with offline."""
    cpus = sorted(os.sched_getaffinity(0))
    rng = np.random.default_rng(seed)
    engine = Engine(make(), max_streams=1, feature_shape=FRAME)
    off = seen = lost = 0
    with ours(cpus[0]) as served:
        address = f"http://127.0.0.1:{served.port}"
        while seen < frames:
            calls = [
                rng.standard_normal((int(rng.integers(0, 400)), FRAME), np.float32)
                for _ in range(100)
            ]
            with Client(address, keep=64) as client:
                streams = [client.open() for _ in calls]
                at = [0] * len(calls)
                found: list[list[Any]] = [[] for _ in calls]
                while any(begin < len(call) for begin, call in zip(at, calls, strict=True)):
                    if rng.random() < 0.1:
                        client._connection.socket.shutdown(socket.SHUT_RDWR)
                        lost += 1
                    places = rng.permutation(len(streams)).tolist()
                    for place in places:
                        count = int(rng.integers(0, 12))
                        part = calls[place][at[place] : at[place] + count]
                        at[place] += len(part)
                        streams[place].push(part)
                    for place in places:
                        if sum(map(len, found[place])) < at[place]:
                            found[place].append(streams[place].pull())
                for place, stream in enumerate(streams):
                    while sum(map(len, found[place])) < len(calls[place]):
                        found[place].append(stream.pull())
            for call, parts in zip(calls, found, strict=True):
                whole = engine.run(rl.Ragged([torch.from_numpy(call)])).values.numpy()
                answers = np.concatenate([np.zeros((0, 1), np.float32), *parts])
                off += int((whole != answers).sum())
                seen += len(whole)
    print(f"Through the socket: {off} of {seen} frames differ in any bit, {lost} reconnections.\n")


def calls(count: int = 1000) -> None:
    """Measure a push and a pull of one frame of each stream, without the step."""
    engine = Engine(make(), max_streams=count, feature_shape=FRAME)
    streams = [engine.open() for _ in range(count)]
    frames = list(torch.randn(count, 1, FRAME).numpy())
    spent = np.zeros((12, 2))
    for place in range(len(spent)):
        begun = time.thread_time()
        for stream, frame in zip(streams, frames, strict=True):
            stream.push(frame)
        pushed = time.thread_time()
        engine.step()
        stepped = time.thread_time()
        for stream in streams:
            stream.pull()
        spent[place] = pushed - begun, time.thread_time() - stepped
    push, pull = 1e6 * np.median(spent, axis=0) / count
    print(f"A push {push:.1f} us, a pull {pull:.1f} us, of {count} streams with one frame each.\n")


# ---- memory, time to open, bits ------------------------------------------------------------------


def resident() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(count: int = 100_000) -> None:
    engine = Engine(rl.nn.LSTM(40, 128).eval(), max_streams=count)
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
        engine = Engine(rl.nn.LSTM(40, 128).eval(), max_streams=slots)
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
    engine = Engine(rl.nn.LSTM(40, 128).eval(), max_streams=1000)

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
    engine = Engine(model, max_streams=100, feature_shape=FRAME, threads=threads, chunk=5)
    whole = Engine(model, max_streams=1, feature_shape=FRAME, threads=1)
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
    parts = (
        "times",
        "calls",
        "server",
        "peer",
        "long",
        "stalls",
        "reconnections",
        "memory",
        "churn",
        "bits",
    )
    parser.add_argument("parts", nargs="+", choices=parts, help="the measurements")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads; 1 pins the process (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="of the long run, and of stalls (default: 600)"
    )
    parser.add_argument(
        "--clients", type=int, default=160, help="of the long run, and of stalls (default: 160)"
    )
    parser.add_argument(
        "--per-socket", type=int, default=1, help="streams of its connections (default: 1)"
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
    cpus = sorted(os.sched_getaffinity(0))
    if options.threads == 1 and not {"server", "peer", "long", "stalls", "reconnections"} & {
        *options.parts
    }:
        os.sched_setaffinity(0, {cpus[-1]})
    print(f"# Live streams\n\n{cpu_name()}, torch {torch.__version__}, {options.threads} threads\n")
    run: dict[str, Callable[[], None]] = {
        "times": partial(times, options.threads),
        "server": partial(server, (cpus[0], cpus[-1])),
        "peer": partial(compared, (cpus[0], cpus[-1])),
        "long": partial(
            long_run, (cpus[0], cpus[-1]), options.seconds, options.clients, options.per_socket
        ),
        "stalls": partial(stalls, (cpus[0], cpus[-1]), options.seconds, options.clients),
        "reconnections": partial(reconnections, int(options.frames), options.seed),
        "calls": calls,
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
