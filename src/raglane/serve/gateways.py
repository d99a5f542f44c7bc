"""Conversations about many live streams over one connection, see docs/streams.md."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

from raglane._utils.messages import quote, quote_all
from raglane.errors import ArgumentError, ArgumentTypeError, ClosedError, RaglaneError
from raglane.serve.conversations import CLOSING, Conversation, count_of
from raglane.serve.live import RefusedError, code_of, decoded, encoded
from raglane.serve.rounds import Lane
from raglane.serve.served import to_json

RECORD = struct.Struct("<II")
"""Before the frames of a stream in a binary message for many: the stream, and their number."""

_MANY = ("open", "reset", "state", "close")  # the messages in JSON
_MOST_NUMBER = 2**32 - 1  # of a stream


class Many(Conversation):
    """Many live streams over a connection, each with a number that the client chose."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._numbers: dict[int, Lane] = {}
        self._parts: list[bytes] = []
        # Connections have the limit of streams, also those without a stream.
        self._key = f"{self._client} /streams"
        self._clients.enter(self._key)
        self._empty_since = monotonic()
        self._clients.conversations.add(self)
        self._send(self._served.shapes())

    def end(self) -> None:
        """See :class:`Conversation`."""
        if not self._is_ended:
            super().end()
            self._clients.leave(self._key)

    def expire(self, idle: float) -> None:
        """Close the connection if it had no stream for ``idle`` seconds."""
        if not self._numbers and monotonic() - self._empty_since > idle:
            self._close(4408, "the connection had no stream for too long")

    def _lanes(self) -> Iterable[Lane]:
        return [*self._numbers.values()]

    def _frames(self, content: bytes) -> None:
        """Read records: the stream, the number of its frames, and the frames."""
        samples = self._samples
        size = self._served.frame_bytes if samples is None else samples.itemsize
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
                error = _message_of("stream", str(number), rule, "send open first")
                self._complain({"stream": number, "error": error, "dropped": count})
            else:
                try:
                    self._arrive(lane, self._rows(lane, bytes(view[at:stop])))
                except (ArgumentError, ArgumentTypeError) as error:
                    self._complain(
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
                self._begin(number, value, count_of(message.get("at", 0)))
            elif lane is None:
                raise RefusedError(404, "stream", str(number), "an open stream", "send open first")
            else:
                self._command(lane, key, value)
        except RaglaneError as error:
            self._complain({"stream": number, "error": str(error), "code": code_of(error)})

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
            self._restart(lane)
            self._send({"stream": number, "reset": True})
        else:
            self._send({"stream": number, "state": encoded(lane.stream), "at": lane.at})

    def _forget(self, lane: Lane) -> None:
        del self._numbers[lane.number]
        self._empty_since = monotonic()
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
            self._close(1001, CLOSING)

    def expired(self, lane: Lane) -> None:
        """See :class:`Conversation`."""
        dropped = self._dropped((lane,))
        self._forget(lane)
        reason = "the stream was idle for too long"
        self._send({"stream": lane.number, "error": reason, "code": 4408, **dropped})


def _message_of(*parts: str) -> str:
    """Return the message of a refusal."""
    return str(RefusedError(400, *parts))
