"""HTTP on one connection: uvicorn's protocol, limits to a request's head, and the end of an answer nobody waits for."""

import asyncio
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
from castline.server.http_exchange import EXTENSION, Exchange

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, beside the pieces of at most 256 KiB in which they begin and end: what follows the
end is no part of them. The parser has no limit, and joins what arrives in pieces in quadratic time."""


class Connection(HttpToolsProtocol):
    """Each of its requests has an Exchange in its ASGI scope.

    While none is being answered, a timer runs: uvicorn's if nothing has come since the last answer, else ``_deadline``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        """Of a head that has not come yet."""
        self.answering: asyncio.Task[Any] | None = None
        """Is cancelled when the client goes away."""
        self.is_lost = False
        """It has gone."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        self.is_lost = True
        if self.answering is not None:
            self.answering.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The date is told when somebody asks, by no timer."""
        self.server_state.default_headers = _date_header(int(time()))
        was_in_head = self._in_head
        self._head_bytes += len(data)  # none of them where a head begins in this piece
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_head:
            if not self._answering and self._deadline is None:
                self._await_head()  # what came began no request, such as a lone CRLF, but ended uvicorn's own timer
        elif self._head_bytes > MAX_HEAD_BYTES:
            message = f"the request's line and headers are larger than the limit of {MAX_HEAD_BYTES} bytes"
            self._refuse(WireFault(ErrorCode.REQUEST_TOO_LARGE, message))
        elif self._deadline is None or not was_in_head:
            self._await_head()  # of its rest; one that comes in one piece needs no timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_has_come()
        super().on_headers_complete()
        extensions: dict[str, Any] = {EXTENSION: Exchange(self, self.cycle)}
        self.scope["extensions"] = extensions  # before the request's task has its first turn

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


@lru_cache(maxsize=1)
def _date_header(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]
