"""Conversations with clients over a WebSocket: one live stream, or many. Without a task, and
without a clock: a link calls ``receive``, and rounds call ``answer``.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from raglane._utils.messages import quote, quote_all, shorten
from raglane.errors import ArgumentError, ArgumentTypeError, ClosedError, RaglaneError
from raglane.serve.live import Clients, RefusedError, code_of, decoded, encoded
from raglane.serve.rounds import Form, Lane
from raglane.serve.served import Served, to_json

log = logging.getLogger("raglane.serve")

RECORD = struct.Struct("<II")
"""Before the frames of a stream in a binary message for many: the stream, and their number."""

_LONGEST_REASON = 120  # bytes of the reason in a close frame, of 123
_MOST_TODO = 64  # messages of a stream that wait for results of earlier ones
_MOST_NUMBER = 2**32 - 1  # of a stream
_ONE = ("frames", "reset", "state", "end")  # the messages in JSON of one stream
_MANY = ("open", "reset", "state", "close")  # of many


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

    def __init__(self, link: Link, served: Served, form: Form, clients: Clients, client: str):
        self.form = form
        self.can_write = True
        self._link = link
        self._served = served
        self._rounds = served.rounds
        self._clients = clients
        self._client = client
        self._full: set[Lane] = set()  # lanes with too many frames or messages
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
            self._rounds.catch_up(self._lanes())

    def end(self) -> None:
        """Close all streams, when the connection is closed."""
        if self._is_ended:
            return
        self._is_ended = True
        self._clients.conversations.discard(self)
        for lane in self._lanes():
            self._leave(lane)

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

    def _close(self, code: int, reason: str) -> None:
        self.end()
        self._link.close(code, short_reason(reason))

    def _dropped(self, lanes: Iterable[Lane]) -> dict[str, int]:
        """Return the number of accepted frames that will have no results, unless it is 0."""
        count = sum(lane.at - lane.answered for lane in lanes)
        return {"dropped": count} if count else {}

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
        if lane.todo or not lane.is_settled:
            lane.todo.append((key, value, at))
            self._load(lane)
        else:
            self._obey(lane, key, value, at)

    def _advance(self, lane: Lane) -> None:
        """Act on messages that waited for the results of earlier ones."""
        while lane.todo and not self._is_ended:
            first = lane.todo[0]
            if isinstance(first, tuple):
                if not lane.is_settled:
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
            rows = self._served.rows(content)
        except (ArgumentError, ArgumentTypeError) as error:
            self._send({"error": str(error), "at": self._lane.at})
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
            self._command(self._lane, key, value, _count(at))

    def _obey(self, lane: Lane, key: str, value: Any, at: int) -> None:
        if key == "end":
            self._close(1000, "end")
        elif key == "reset":
            lane.stream.reset()
            lane.begin()
            self._send({"reset": True})
        elif value is True:
            self._send({"state": encoded(lane.stream), "at": lane.at})
        else:
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
            self._close(1001, "the server is closing")

    def expired(self, lane: Lane) -> None:
        """See :class:`Conversation`."""
        reason = "the stream was idle for too long"
        dropped = self._dropped((lane,))
        if dropped:
            self._send({"error": reason, **dropped})
        self._close(4408, reason)


class Many(Conversation):
    """Many live streams over a connection, each with a number that the client chose."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._numbers: dict[int, Lane] = {}
        self._parts: list[bytes] = []
        self._clients.check_open()
        self._clients.conversations.add(self)
        self._send(self._served.shapes())

    def _lanes(self) -> Iterable[Lane]:
        return [*self._numbers.values()]

    def _frames(self, content: bytes) -> None:
        """Read records: the stream, the number of its frames, and the frames."""
        size = self._served.frame_bytes
        end = len(content)
        at = 0
        view = memoryview(content)
        while at < end:
            if end - at < RECORD.size:
                got = f"{end - at} bytes after the last frame"
                raise RefusedError(400, "message", got, "records of whole frames", "correct it")
            number, count = RECORD.unpack_from(content, at)
            at += RECORD.size
            stop = at + count * size
            if stop > end:
                got = f"{count} frames of {size} bytes in {end - at} bytes"
                raise RefusedError(400, "message", got, "records of whole frames", "correct it")
            lane = self._numbers.get(number)
            if lane is None:
                rule = "a stream that was opened"
                error = message_of("stream", str(number), rule, "send open first")
                self._send({"stream": number, "error": error, "dropped": count})
            else:
                try:
                    self._arrive(lane, self._served.rows(view[at:stop]))
                except (ArgumentError, ArgumentTypeError) as error:
                    self._send(
                        {"stream": number, "error": str(error), "at": lane.at, "dropped": count}
                    )
            at = stop

    def _message(self, message: dict[str, Any], text: str) -> None:
        keys = [key for key in _MANY if key in message]
        rest = {key for key in message if key not in ("stream", "at", *_MANY)}
        number = message.get("stream")
        if type(number) is not int or not 0 <= number <= _MOST_NUMBER or len(keys) != 1 or rest:
            rule = (
                f"an object with stream, a whole number below 2^32, and one of {quote_all(_MANY)}"
            )
            raise RefusedError(400, "message", quote(text), rule, "correct it")
        key = keys[0]
        value = message[key]
        lane = self._numbers.get(number)
        try:
            if key == "open":
                self._begin(number, value, _count(message.get("at", 0)))
            elif lane is None:
                raise RefusedError(404, "stream", str(number), "an open stream", "send open first")
            else:
                self._command(lane, key, value)
        except RaglaneError as error:
            self._send({"stream": number, "error": str(error), "code": code_of(error)})

    def _begin(self, number: int, value: Any, at: int) -> None:
        """Open a stream, or continue one from a state."""
        if number in self._numbers:
            fix = "close it first"
            raise RefusedError(400, "stream", f"{number}, which is open", "a new number", fix)
        lane = self._open(number, None if value is True else decoded(value))
        lane.begin(at)
        self._numbers[number] = lane
        self._send({"stream": number, "open": True, "at": at})

    def _obey(self, lane: Lane, key: str, value: Any, at: int) -> None:  # noqa: ARG002
        number = lane.number
        if value is not True:
            raise RefusedError(400, key, quote(value), "true", "send true")
        if key == "close":
            self._forget(lane)
            self._send({"stream": number, "closed": True, "at": lane.at})
        elif key == "reset":
            lane.stream.reset()
            lane.begin()
            self._send({"stream": number, "reset": True})
        else:
            self._send({"stream": number, "state": encoded(lane.stream), "at": lane.at})

    def _forget(self, lane: Lane) -> None:
        del self._numbers[lane.number]
        self._leave(lane)

    def _send(self, content: Mapping[str, Any]) -> None:
        self._flush()
        super()._send(content)

    def answer(self, lane: Lane, content: Any, count: int) -> None:
        """See :class:`Conversation`."""
        if isinstance(content, dict):
            self._link.send(to_json({"stream": lane.number, "at": lane.answered, **content}))
        else:
            self._parts += (RECORD.pack(lane.number, count), content)

    def _flush(self) -> None:
        """Send the results of a round in one message."""
        if self._parts:
            content = b"".join(self._parts)
            self._parts = []
            self._link.send(content)

    def finish(self) -> None:
        """See :class:`Conversation`."""
        self._flush()
        lanes = self._lanes()
        for lane in lanes if self._full or any(lane.todo for lane in lanes) else ():
            self._advance(lane)
        if self._is_draining and not self._is_ended:
            if any(lane.todo or not lane.is_settled for lane in lanes):
                return
            try:
                for lane in lanes:
                    self._obey(lane, "state", True, 0)
            except ClosedError as error:
                self.fail(error)
                return
            self._close(1001, "the server is closing")

    def expired(self, lane: Lane) -> None:
        """See :class:`Conversation`."""
        dropped = self._dropped((lane,))
        self._forget(lane)
        reason = "the stream was idle for too long"
        self._send({"stream": lane.number, "error": reason, "code": 4408, **dropped})


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


def _count(at: Any) -> int:
    if type(at) is not int or not 0 <= at < 2**53:
        rule = "the number of frames before the state"
        raise RefusedError(400, "at", quote(at), rule, "send that of the message with the state")
    return at


def message_of(*parts: str) -> str:
    """Return the message of a refusal."""
    return str(RefusedError(400, *parts))


def error_text(error: Exception) -> str:
    """Return the message of an error for a client."""
    return (
        str(error)
        if isinstance(error, RaglaneError)
        else "internal error; the log of the server shows it"
    )


def short_reason(text: str) -> str:
    """Return the beginning of a text that a close frame has room for."""
    return shorten(text, _LONGEST_REASON).encode()[:_LONGEST_REASON].decode(errors="ignore")
