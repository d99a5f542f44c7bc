"""The streams of a client, without a connection: messages that are sent and received, and those that
continue all streams over a new connection.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_count
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, ShapeError

_RECORD = struct.Struct("<II")
_DTYPES = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}


class StreamState(NamedTuple):
    """The state of a stream after ``at`` frames, for :meth:`Client.open`."""

    content: bytes
    at: int


class Remembered:
    """A stream as its client remembers it: the last state, and the frames since then."""

    def __init__(self, number: int, state: StreamState | None) -> None:
        self.number = number
        self.state = state
        self.since = deque[npt.NDArray[Any]]()  # frames after the state
        self.pushed = self.received = self.at  # frames, and results
        self.results = deque[npt.NDArray[Any]]()
        self.skip = 0  # results that were received over an earlier connection
        self.states = 0  # that were requested
        self.asked = False  # by a caller
        self.error: Exception | None = None
        self.is_closed = False

    @property
    def at(self) -> int:
        """The number of frames before the state."""
        return 0 if self.state is None else self.state.at


class Streams:
    """The streams of a connection, without the connection."""

    def __init__(self, keep: int) -> None:
        self.keep = check_count("keep", keep)
        self.streams: dict[int, Remembered] = {}
        self.width = 0
        self._next = 0

    def greet(self, text: str | bytes) -> None:
        """Read the first message of the server."""
        facts = json.loads(text)
        if "error" in facts:
            raise ClosedError("server", facts["error"], "a server with this model", "correct it")
        names = {key: facts[key]["datatype"] for key in ("frames", "results")}
        if not set(names.values()) <= {*_DTYPES}:
            raise ArgumentError("model", f"one of {names}", "of FP32, FP64 or INT64", "convert it")
        self.dtype = np.dtype(_DTYPES[names["frames"]])
        self.shape = tuple(facts["frames"]["shape"])
        self.result_dtype = np.dtype(_DTYPES[names["results"]])
        self.result_shape = tuple(facts["results"]["shape"])
        self.width = math.prod(self.result_shape) * self.result_dtype.itemsize

    def open(self, state: StreamState | None) -> tuple[Remembered, str]:
        """Return a new stream, and the message that opens it."""
        if state is not None and not isinstance(state, StreamState):
            raise ArgumentTypeError(
                "state", quote(state), "a State, or None", "pass the result of state()"
            )
        stream = self.streams[self._next] = Remembered(self._next, state)
        self._next += 1
        return stream, self._opening(stream)

    def _opening(self, stream: Remembered) -> str:
        message: dict[str, Any] = {"stream": stream.number, "open": True}
        if stream.state is not None:
            content = base64.b64encode(stream.state.content).decode()
            message |= {"open": content, "at": stream.state.at}
        return json.dumps(message)

    def again(self) -> list[str | bytes]:
        """Return what continues all streams over a new connection."""
        messages: list[str | bytes] = []
        for stream in self.streams.values():
            stream.states = int(stream.asked)
            stream.skip = stream.received - stream.at
            messages.append(self._opening(stream))
            if stream.since:
                messages.append(self._record(stream, np.concatenate(list(stream.since))))
            if stream.asked:
                messages.append(json.dumps({"stream": stream.number, "state": True}))
        return messages

    def push(self, stream: Remembered, frames: Any) -> list[str | bytes]:
        """Return the messages that send frames, and now and then ask for a state."""
        raise_failure(stream)
        try:
            rows = np.array(frames, self.dtype)
        except (TypeError, ValueError) as error:
            rule = f"numbers of {self.dtype}"
            raise ArgumentTypeError("frames", quote(frames), rule, "convert them") from error
        if rows.shape[1:] != self.shape or not rows.ndim:
            rule = f"shape ({', '.join(map(str, ('n', *self.shape)))})"
            raise ShapeError("frames", f"shape {rows.shape}", rule, "reshape them")
        messages: list[str | bytes] = [self._record(stream, rows)]
        stream.since.append(rows)
        before = stream.pushed
        stream.pushed += len(rows)
        if stream.pushed // self.keep > before // self.keep:
            messages += self.request(stream)
        return messages

    @staticmethod
    def _record(stream: Remembered, rows: npt.NDArray[Any]) -> bytes:
        return _RECORD.pack(stream.number, len(rows)) + rows.tobytes()

    @staticmethod
    def request(stream: Remembered) -> list[str | bytes]:
        """Return the request of a state."""
        stream.states += 1
        return [json.dumps({"stream": stream.number, "state": True})]

    def receive(self, content: str | bytes) -> None:
        """Note the results or the answer in a message."""
        if isinstance(content, str):
            self._note(json.loads(content))
            return
        at = 0
        while at < len(content):
            number, count = _RECORD.unpack_from(content, at)
            at += _RECORD.size
            end = at + count * self.width
            rows = np.frombuffer(content[at:end], self.result_dtype)
            at = end
            stream = self.streams.get(number)
            if stream is None:
                continue
            rows = rows.reshape(count, *self.result_shape)
            again = min(stream.skip, count)
            stream.skip -= again
            if count > again:
                stream.received += count - again
                stream.results.append(rows[again:])

    def _note(self, answer: dict[str, Any]) -> None:
        stream = self.streams.get(answer.get("stream", -1))
        if stream is None:
            if "error" in answer and "stream" not in answer:
                for other in self.streams.values():
                    other.error = ClosedError("server", answer["error"], "working", "see its log")
            return
        if "error" in answer:
            kind = BusyError if answer.get("code") in (1013, 4429) else ClosedError
            stream.error = kind("stream", answer["error"], "accepted by the server", "correct it")
        elif "state" in answer:
            stream.state = StreamState(base64.b64decode(answer["state"]), answer["at"])
            after = stream.pushed - stream.at  # frames after the state
            have = sum(map(len, stream.since))
            while stream.since and have - len(stream.since[0]) >= after:
                have -= len(stream.since.popleft())
            if have > after:
                stream.since[0] = stream.since[0][have - after :]
            stream.states = max(0, stream.states - 1)
        elif "closed" in answer:
            stream.is_closed = True
            del self.streams[stream.number]

    def taken(self, stream: Remembered) -> npt.NDArray[Any] | None:
        """Return the results that were received, and remove them; None without any."""
        if stream.results:
            rows = np.concatenate(list(stream.results))
            stream.results.clear()
            return rows
        raise_failure(stream)
        return None


def raise_failure(stream: Remembered) -> None:
    """Raise what has ended a stream."""
    if stream.error is not None:
        raise stream.error
    if stream.is_closed:
        raise ClosedError("stream", "a closed stream", "an open stream", "open another one")
