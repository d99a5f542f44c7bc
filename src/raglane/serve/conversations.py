"""Conversations with clients over a WebSocket: one live stream, or many. Without a task, and
without a clock: a link calls ``receive``, and rounds call ``answer``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from raglane._utils.messages import quote, quote_all
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    RaglaneError,
    ShapeError,
)
from raglane.serve.live import (
    Clients,
    RefusedError,
    code_of,
    decoded,
    encoded,
    error_text,
    short_reason,
)
from raglane.serve.rounds import Form, Lane
from raglane.serve.served import Served, to_json

log = logging.getLogger("raglane.serve")

CLOSING = "the server is closing"
"""The reason of a close with the code 1001."""

_PCM = 32768.0  # the amplitude 1 in int16
_MOST_UNREAD = 64  # errors
_MOST_TODO = 64  # messages of a stream that wait for results of earlier ones
_ONE = ("frames", "reset", "state", "end")  # the messages in JSON of one stream


class Link(Protocol):
    """A connection that carries messages."""

    def send(self, content: str | bytes) -> None:
        """Send a message."""

    def close(self, code: int, reason: str) -> None:
        """Close the connection, after what was sent."""

    def read(self, is_wanted: bool) -> None:
        """Continue to read messages, or pause."""


class Conversation:
    """The base of conversations with one and with many streams."""

    def __init__(
        self,
        link: Link,
        served: Served,
        form: Form,
        samples: np.dtype[Any] | None,
        clients: Clients,
        client: str,
    ):
        self.form = form
        self._samples = samples  # of binary messages, in chunks of any size; None for whole frames
        self.can_write = True
        self._link = link
        self._served = served
        self._rounds = served.rounds
        self.idle = served.streams.idle  # seconds
        self._clients = clients
        self._client = client
        self._full: set[Lane] = set()  # lanes with too many frames or messages
        self._unread = 0  # errors since the client does not read
        self._is_draining = False
        self._is_ended = False

    # What the link calls.

    def receive(self, content: str | bytes) -> None:
        """Act on a message; after the end it is ignored."""
        if self._is_ended:
            return
        try:
            if isinstance(content, str):
                self._message(_parsed(content), content)
            else:
                self._frames(content)
        except Exception as error:
            self.fail(error)

    def writing(self, is_possible: bool) -> None:
        """Note whether the client reads; results wait in the engine until it does."""
        self.can_write = is_possible
        if is_possible and not self._is_ended:
            self._unread = 0
            self._rounds.catch_up(self._lanes())
            self.finish()

    def end(self) -> None:
        """Close all streams, when the connection is closed."""
        if self._is_ended:
            return
        self._is_ended = True
        self._clients.conversations.discard(self)
        for lane in self._lanes():
            self._leave(lane)

    def expire(self, idle: float) -> None:
        """Close a connection that was idle, unless its streams tell that they were."""

    def drain(self) -> None:
        """Read no more messages; answer all frames that were read, send the states, and close."""
        self._is_draining = True
        self._link.read(False)
        self.finish()

    # What rounds call.

    def answer(self, lane: Lane, content: Any, count: int) -> None:
        """Take the results of ``count`` frames of a lane."""
        raise NotImplementedError

    def finish(self) -> None:
        """Continue with what waited for results."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End the conversation for an error, with its message."""
        if self._is_ended:
            return
        if not isinstance(error, RaglaneError):
            log.error("a stream failed", exc_info=error)
        text = error_text(error)
        self._send({"error": text, **self._dropped(self._lanes())})
        self._close(code_of(error), text)

    def stop(self) -> None:
        """End the conversation, because the server closes before all frames are answered."""
        if self._is_ended:
            return
        dropped = self._dropped(self._lanes())
        if dropped:
            self._send({"error": CLOSING, **dropped})
        self._close(1001, CLOSING)

    def expired(self, lane: Lane) -> None:
        """End a lane that was idle."""
        raise NotImplementedError

    # Parts of conversations.

    def _lanes(self) -> Iterable[Lane]:
        raise NotImplementedError

    def _frames(self, content: bytes) -> None:
        raise NotImplementedError

    def _message(self, message: dict[str, Any], text: str) -> None:
        raise NotImplementedError

    def _obey(self, lane: Lane, key: str, value: Any, at: int) -> None:
        """Act on a message for a lane all of whose frames are answered."""
        raise NotImplementedError

    @staticmethod
    def _restart(lane: Lane) -> None:
        lane.stream.reset()
        lane.rest = b""
        lane.begin()

    def _open(self, number: int = 0, state: bytes | None = None) -> Lane:
        self._clients.enter(self._client)
        try:
            return self._rounds.open(self, number, state)
        except BaseException:
            self._clients.leave(self._client)
            raise

    def _leave(self, lane: Lane) -> None:
        self._rounds.close(lane)
        self._full.discard(lane)
        self._clients.leave(self._client)

    def _send(self, content: Mapping[str, Any]) -> None:
        self._link.send(to_json(content))

    def _complain(self, content: Mapping[str, Any]) -> None:
        """Send an error after which the conversation goes on; raise if a client does not read many
        of them, which would fill the memory.
        """
        self._send(content)
        self._unread += not self.can_write
        if self._unread > _MOST_UNREAD:
            got = f"{self._unread} that were not"
            raise RefusedError(400, "errors", got, "read by the client", "read them")

    def _close(self, code: int, reason: str) -> None:
        self.end()
        self._link.close(code, short_reason(reason))

    def _dropped(self, lanes: Iterable[Lane]) -> dict[str, int]:
        """Return the number of accepted frames that will have no results, unless it is 0."""
        count = sum(
            lane.at
            - lane.answered
            + sum(rows.shape[0] for rows in lane.todo if not isinstance(rows, tuple))
            for lane in lanes
        )
        return {"dropped": count} if count else {}

    def _rows(self, lane: Lane, content: Any) -> Any:
        """Return the frames of a message that the engine accepts, ``(n, width)``; raise if it does
        not. Samples that are no whole frame yet are kept.
        """
        samples = self._samples
        if samples is None or isinstance(content, list | str):
            return self._served.rows(content)
        if len(content) % samples.itemsize:
            got = f"{len(content)} bytes"
            rule = f"whole samples of {samples.itemsize} bytes, {samples.name} in little endian"
            raise ShapeError("samples", got, rule, "send whole samples")
        data = lane.rest + content
        size = samples.itemsize * self._served.streams.accepts.width
        end = len(data) // size * size
        values = np.frombuffer(data[:end], samples).astype(np.float32)
        if samples.kind == "i":
            values /= _PCM
        rows = self._served.rows(values.tobytes())
        lane.rest = data[end:]
        return rows

    def _arrive(self, lane: Lane, rows: Any) -> None:
        """Pass frames on, after the messages before them."""
        if lane.todo:
            lane.todo.append(rows)
        elif rows.shape[0]:
            self._rounds.arrive(lane, rows)
        else:
            # It is activity too.
            lane.stream.push([])
        self._load(lane)

    def _command(self, lane: Lane, key: str, value: Any, at: int = 0) -> None:
        """Act on a message when all frames before it are answered."""
        # Answers wait for a client that does not read, too.
        if lane.todo or not lane.is_settled or not self.can_write:
            lane.todo.append((key, value, at))
            self._load(lane)
        else:
            self._obey(lane, key, value, at)

    def _advance(self, lane: Lane) -> None:
        """Act on messages that waited for the results of earlier ones."""
        while lane.todo and not self._is_ended:
            first = lane.todo[0]
            if isinstance(first, tuple):
                if not lane.is_settled or not self.can_write:
                    break
                lane.todo.popleft()
                try:
                    self._obey(lane, *first)
                except Exception as error:
                    self.fail(error)
                    return
            else:
                lane.todo.popleft()
                if first.shape[0]:
                    self._rounds.arrive(lane, first)
        self._load(lane)

    def _load(self, lane: Lane) -> None:
        """Stop reading while a lane has too much that waits."""
        is_full = lane.waiting > self._served.streams.max_queue or len(lane.todo) > _MOST_TODO
        if is_full and lane.stream._slot >= 0:
            if not self._full:
                self._link.read(False)
            self._full.add(lane)
        elif self._full:
            self._full.discard(lane)
            if not self._full and not self._is_draining:
                self._link.read(True)


class One(Conversation):
    """One live stream over a connection: frames in, results out, in order."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._lane = self._open()
        self._clients.conversations.add(self)

    def _lanes(self) -> Iterable[Lane]:
        return (self._lane,)

    def _frames(self, content: bytes) -> None:
        self._push(content)

    def _push(self, content: Any) -> None:
        try:
            rows = self._rows(self._lane, content)
        except (ArgumentError, ArgumentTypeError) as error:
            self._complain({"error": str(error), "at": self._lane.at})
            return
        self._arrive(self._lane, rows)

    def _message(self, message: dict[str, Any], text: str) -> None:
        at = message.pop("at", 0) if isinstance(message.get("state"), str) else 0
        if len(message) != 1 or next(iter(message)) not in _ONE:
            rule = f"an object with one of {quote_all(_ONE)}"
            raise RefusedError(400, "message", quote(text), rule, "correct it")
        ((key, value),) = message.items()
        if key in ("reset", "end") and value is not True:
            raise RefusedError(400, key, quote(value), "true", "send true, or no such message")
        if key == "frames":
            self._push(value)
        else:
            self._command(self._lane, key, value, count_of(at))

    def _obey(self, lane: Lane, key: str, value: Any, at: int) -> None:
        if key == "end":
            self._close(1000, "end")
        elif key == "reset":
            self._restart(lane)
            self._send({"reset": True})
        elif value is True:
            self._send({"state": encoded(lane.stream), "at": lane.at})
        else:
            lane.rest = b""
            self._rounds.restore(lane, decoded(value), at)
            self._send({"restored": True, **({"at": at} if at else {})})

    def answer(self, lane: Lane, content: Any, count: int) -> None:  # noqa: ARG002
        """See :class:`Conversation`."""
        if isinstance(content, dict):
            content = to_json({"at": lane.answered, **content})
        self._link.send(content)

    def finish(self) -> None:
        """See :class:`Conversation`."""
        lane = self._lane
        if self._full or lane.todo:
            self._advance(lane)
        if self._is_draining and not self._is_ended and lane.is_settled and not lane.todo:
            try:
                self._send({"state": encoded(lane.stream), "at": lane.at})
            except ClosedError as error:
                self.fail(error)
                return
            self._close(1001, CLOSING)

    def expired(self, lane: Lane) -> None:
        """See :class:`Conversation`."""
        reason = "the stream was idle for too long"
        dropped = self._dropped((lane,))
        if dropped:
            self._send({"error": reason, **dropped})
        self._close(4408, reason)


def _parsed(text: str) -> dict[str, Any]:
    """Return a message in JSON."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(422, "message", quote(text), "JSON", "send an object") from None
    if not isinstance(content, dict):
        rule = "an object with one of " + quote_all(_ONE)
        raise RefusedError(400, "message", quote(text), rule, "correct it")
    return content


def count_of(at: Any) -> int:
    """Return a number of frames in a message."""
    if type(at) is not int or not 0 <= at < 2**53:
        rule = "the number of frames before the state"
        raise RefusedError(400, "at", quote(at), rule, "send that of the message with the state")
    return at
