"""Servers of the voice detector as processes, and the clients that measure them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import raglane as rl
from harness.sockets import POOL, Facts, Load, drive, echo, frames_of
from raglane.serve import Engine

HERE = Path(__file__).parents[1]
sys.path.append(str(HERE.parent / "examples"))
from voice_activity import FRAME, Detector  # noqa: E402

PERIOD = FRAME / 16_000  # seconds from frame to frame
MOST_LOAD = 0.7  # of the clients' processor, else a row does not count
_TICKS = os.sysconf("SC_CLK_TCK")

PEER = """
import numpy as np, onnxruntime
from fastapi import FastAPI, WebSocket
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession("model.onnx", options)
app = FastAPI()
@app.websocket("/stream")
async def stream(socket: WebSocket):
    await socket.accept()
    states = [np.zeros((1, size), np.float32) for size in (64, 128, 128)]
    while True:
        frame = np.frombuffer(await socket.receive_bytes(), np.float32)[None]
        names = ("samples", "context", "h", "c")
        answer, *states = session.run(None, dict(zip(names, (frame, *states))))
        await socket.send_bytes(answer.tobytes())
"""


def make() -> Detector:
    """Return the detector, with the same weights in every process."""
    torch.manual_seed(0)
    return Detector().eval()


class Server(NamedTuple):
    """A process that serves."""

    pid: int
    port: int

    def cpu(self) -> float:
        """Return the seconds of a processor that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> int:
        """Return the resident memory in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def busy(self) -> float:
        """Return the seconds of a processor in which the model ran."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text = answer.read().decode()
        match = re.search(r"^raglane_busy_seconds_total\{.*\} (\S+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0


@contextmanager
def ours(processor: int, trace: Path | None = None) -> Iterator[Server]:
    """Run ``raglane serve``; with the file of a trace of its stalls."""
    command: list[Any] = [Path(sys.executable).with_name("raglane")]
    if trace is not None:
        command = [sys.executable, "-m", "harness.stalls", trace]
    command += ["serve", "--port", "0", "--max-streams", "4000"]
    command += ["--model", "voice=harness.serving:make", "--feature-shape", str(FRAME)]
    command += ["--max-streams-per-client", "4000"]
    with _process(command, processor, HERE, r"serving: http://\S+:(\d+)") as server:
        yield server


@contextmanager
def peer(processor: int, write: Any) -> Iterator[Server]:
    """Run the few lines of FastAPI that call ONNX Runtime for each message."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "model.onnx"))
        Path(folder, "peer.py").write_text(PEER)
        command = [sys.executable, "-m", "uvicorn", "peer:app", "--port", "0"]
        command += ["--ws-per-message-deflate", "false", "--no-access-log"]
        with _process(command, processor, Path(folder), r"running on http://\S+:(\d+)") as server:
            yield server


@contextmanager
def _process(command: Any, processor: int, folder: Path, pattern: str) -> Iterator[Server]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(processor), *command],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            match = None
            while match is None:
                time.sleep(0.1)
                log.seek(0)
                text = log.read()
                assert process.poll() is None, text
                match = re.search(pattern, text)
            time.sleep(0.5)
            yield Server(process.pid, int(match[1]))
        finally:
            process.terminate()
            process.wait(60)


class Row(NamedTuple):
    """One measurement of clients against a server."""

    streams: int
    per_socket: int
    seconds: float
    facts: Facts
    cpu: float  # seconds of the server's processor
    busy: float  # of these, seconds in which the model ran
    off: int  # answers with other bits than offline; -1 if they were not compared
    memory: tuple[int, ...]  # bytes, over time

    @property
    def p99(self) -> float:
        return float(np.percentile(self.facts.latencies, 99))

    @property
    def late(self) -> int:
        return int((self.facts.latencies > PERIOD).sum())

    def text(self, what: str) -> str:
        facts = self.facts
        latencies = facts.latencies
        middle, most = 1e3 * float(np.median(latencies)), 1e3 * float(latencies.max())
        frame = 1e6 / max(1, facts.answered)
        counts = "" if facts.load < MOST_LOAD else " (does not count)"
        cells = [
            f"{what}",
            f"{self.streams} / {self.per_socket}",
            f"{self.seconds:g}",
            f"{middle:.1f}",
            f"{1e3 * self.p99:.1f}",
            f"{most:.0f}",
            f"{self.late} of {facts.sent}",
            f"{facts.sent - facts.answered}",
            f"{frame * self.cpu:.1f}",
            f"{frame * self.busy:.1f}" if self.busy else "",
            f"{self.cpu / self.seconds:.2f}",
            f"{facts.load:.2f}{counts}",
            "" if self.off < 0 else f"{self.off}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| server | streams / per socket | seconds | p50, ms | p99, ms | most, ms | late | lost "
    "| CPU per frame, us | of it the model | CPU of the server | of the clients | other bits |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def trial(
    server: Server,
    streams: int,
    per_socket: int,
    seconds: float,
    processor: int,
    *,
    compares: bool = True,
    seed: int = 0,
) -> Row:
    """Measure a server with clients in another process."""
    path = "/streams" if per_socket > 1 else "/stream?answers=binary"
    load = Load(server.port, path, streams, per_socket, seconds, PERIOD, FRAME, seed, processor)
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=drive, args=(load, theirs))
    process.start()
    assert ours.recv() == "begin"
    measures = server.busy() if compares else 0.0
    cpu = server.cpu()
    memory = [server.memory()]
    while not ours.poll(min(60.0, seconds)):
        memory.append(server.memory())
    facts = ours.recv()
    cpu = server.cpu() - cpu
    busy = server.busy() - measures if compares else 0.0
    memory.append(server.memory())
    process.join()
    off = _differing(facts, seed) if compares else -1
    return Row(streams, per_socket, seconds, facts, cpu, busy, off, tuple(memory))


def _differing(facts: Facts, seed: int) -> int:
    """Return the number of answers whose bits are not those of whole sequences."""
    engine = Engine(make(), max_streams=1, feature_shape=FRAME)
    frames = torch.from_numpy(frames_of(seed, FRAME))
    off = 0
    for number, answers in enumerate(facts.answers):
        turns = (number + np.arange(len(answers))) % POOL
        whole = engine.run(rl.Ragged([frames[torch.from_numpy(turns)]])).values[:, 0]
        off += int((whole.numpy() != answers).sum())
    return off


def echoed(streams: int, seconds: float, processors: tuple[int, int]) -> Row:
    """Measure a server that only echoes, over the same socket layer."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=echo, args=(theirs, processors[0]), daemon=True)
    process.start()
    port = ours.recv()
    assert process.pid is not None
    row = trial(Server(process.pid, port), streams, 1, seconds, processors[1], compares=False)
    process.terminate()
    return row


def most_clients(
    name: str, server: Server, counts: list[int], per_socket: int, processor: int, **options: Any
) -> Row | None:
    """Print a row per count, and return the first whose p99 is below the period."""
    for count in counts:
        row = trial(server, count, per_socket, 8, processor, **options)
        print(row.text(name), flush=True)
        if row.p99 < PERIOD and row.facts.answered == row.facts.sent:
            return row
    return None
