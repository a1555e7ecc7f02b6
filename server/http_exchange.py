"""One request and its answer on a connection: short ways past ASGI's messages, each of which takes tasks and turns of
the event loop.

They write what uvicorn's cycle would have written, and leave it in the state that it would be in; a test compares both.
"""

import asyncio
from collections.abc import Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from castline.server.http_protocol import Connection

EXTENSION = "castline.exchange"
"""Of the ASGI scope."""

_EVENTS_HEAD = (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\n"
    b"transfer-encoding: chunked\r\n"
)


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class Exchange:
    def __init__(self, connection: "Connection", cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def take_body(self) -> bytes | None:
        """The request's body if all of it has come; None if it must be received in messages."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        self.resume_reading()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def resume_reading(self) -> None:
        """Call it when all of a body has been taken: reading is paused behind a large one, and who does not read is not
        told that the client has gone.
        """
        self._cycle.flow.resume_reading()

    async def run(self, answer: Coroutine[Any, Any, None]) -> None:
        """Awaits *answer*; cancels it and raises ClientGone when the client goes away."""
        connection = self._connection
        if connection.is_lost:
            answer.close()
            raise ClientGone
        task = connection.answering = asyncio.current_task()
        assert task is not None
        try:
            await answer
        except asyncio.CancelledError:
            if connection.is_lost and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            connection.answering = None

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer has been written."""
        return self._cycle.response_started

    @property
    def can_write(self) -> bool:
        """False where a message would have to wait, or would go nowhere."""
        return not self._cycle.flow.write_paused and not self._cycle.transport.is_closing()

    def write_events(self, events: bytes) -> None:
        """Server-sent events, at least one, behind the head of their stream. Only where ``can_write``."""
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        self._cycle.transport.write(chunk if self.has_begun else self._begin() + chunk)

    async def send_events(self, events: bytes) -> None:
        """As ``write_events``, when it can be done."""
        if not self.can_write:
            await self._cycle.flow.drain()
        if not self._cycle.disconnected:
            self.write_events(events)

    async def send_last_events(self, events: bytes) -> None:
        """The end of a stream."""
        if not self.has_begun:
            self._cycle.transport.write(self._begin())
        await self._cycle.send({"type": "http.response.body", "body": events, "more_body": False})

    def _begin(self) -> bytes:
        """The head of a stream of events, which counts as written."""
        cycle = self._cycle
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        lines = [b"HTTP/1.1 200 OK\r\n", *(b"%b: %b\r\n" % header for header in cycle.default_headers), _EVENTS_HEAD]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Of a request on a castline Connection."""
    exchange: Exchange = scope["extensions"][EXTENSION]
    return exchange
