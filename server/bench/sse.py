"""Incremental parser of ``text/event-stream``, after section 9.2.6 of the WHATWG HTML standard.

Frames may be cut anywhere, also inside a UTF-8 character or between CR and LF; comments, unknown fields and a leading
byte-order mark are skipped. An event that the stream ends without a blank line is dropped, as the standard says.
"""

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    event: bytes
    """b"" where the stream names none."""
    data: bytes


class SseParser:
    """Feed it bytes as they arrive; it returns the events that are complete."""

    def __init__(self) -> None:
        self._partial = b""
        self._after_cr = False
        self._at_start = True
        self._event = b""
        self._data: list[bytes] = []

    def feed(self, frame: bytes) -> list[SseEvent]:
        if self._after_cr and frame.startswith(b"\n"):
            frame = frame[1:]
            self._after_cr = False
        if frame:
            self._after_cr = frame.endswith(b"\r")
        lines = _LINE_END.split(self._partial + frame)
        self._partial = lines.pop()
        events: list[SseEvent] = []
        for line in lines:
            if self._at_start:
                self._at_start = False
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line:
                self._take_field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        return events

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value

    def _dispatch(self) -> SseEvent | None:
        event = SseEvent(self._event, b"\n".join(self._data)) if self._data else None
        self._event = b""
        self._data = []
        return event
