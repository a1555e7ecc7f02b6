"""HTTP on one connection: uvicorn's protocol, limits to a request's head, and a short way for a stream's chunks."""

import asyncio
from collections.abc import MutableMapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from time import time
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from castline.engines.errors import ErrorCode
from castline.server import http_wire
from castline.server.errors import ServerCode, WireFault, to_wire

_EXTENSION = "castline.connection"
"""Of the ASGI scope."""

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, beside the piece of at most 256 KiB in which they begin. The parser has no limit,
and joins what arrives in pieces in quadratic time."""


class Connection(HttpToolsProtocol):
    """Once a chunked answer has started with an ASGI message, its chunks may be written here, without a task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        """Of a head that has not come yet."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The date is told when somebody asks, by no timer."""
        self.server_state.default_headers = _date_header(int(time()))
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"the request's line and headers are larger than the limit of {MAX_HEAD_BYTES} bytes"
                self._refuse(WireFault(ErrorCode.REQUEST_TOO_LARGE, message))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._await_head()
        extensions: dict[str, Any] = {_EXTENSION: self}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_has_come()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_has_come()
        self._deadline = self.loop.call_later(http_wire.RECEIVE_TIMEOUT_S, self._too_late)

    def _head_has_come(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self._answering:
            self._await_head()  # of a request behind the one that is being answered
        elif self._in_head:
            self._refuse(to_wire(http_wire.late_fault()))
        else:
            self.transport.close()  # nothing was asked

    def send_400_response(self, msg: str) -> None:
        """What the parser takes for no HTTP."""
        self._refuse(WireFault(ServerCode.BAD_REQUEST, msg))

    def _refuse(self, fault: WireFault) -> None:
        """Answers what is no request, and closes; nothing is put into an answer that is on its way."""
        if not self._answering:
            body = msgspec.json.encode(http_wire.fault_body(fault))
            status = HTTPStatus(fault.row.http_status)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), *(b"%b: %b" % header for header in headers)]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def can_write(self) -> bool:
        """False where an ASGI message would have to wait, or would go nowhere."""
        return not self.flow.write_paused and not self.transport.is_closing()

    def write_chunk(self, body: bytes) -> None:
        """As an ASGI message with ``more_body``. *body* is not empty."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


@lru_cache(maxsize=1)
def _date_header(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


def connection_of(scope: MutableMapping[str, Any]) -> Connection | None:
    """The connection of a request; None under another server than castline's own."""
    connection: Connection | None = scope.get("extensions", {}).get(_EXTENSION)
    return connection
