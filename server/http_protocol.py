"""HTTP on one connection: uvicorn's protocol, and a way past it for the chunks of a stream."""

from collections.abc import MutableMapping
from email.utils import formatdate
from functools import lru_cache
from time import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "castline.connection"
"""Of the ASGI scope."""


class Connection(HttpToolsProtocol):
    """Once a chunked answer has started with an ASGI message, its chunks may be written here, without a task."""

    def data_received(self, data: bytes) -> None:
        """The date is told when somebody asks, by no timer."""
        self.server_state.default_headers = _date_header(int(time()))
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {_EXTENSION: self}
        self.scope["extensions"] = extensions

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
