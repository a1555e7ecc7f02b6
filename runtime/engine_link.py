"""The serving side's end of the socket to the engine process, inside an event loop."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from castline.runtime.wire import Command, Report, encode, report_reader


class EngineListener(Protocol):
    """Called from the event loop."""

    def on_report(self, report: Report) -> None: ...

    def on_unsendable(self, command: Command, error: Exception) -> None:
        """Something in *command* has no form on the wire: it is dropped, and the others go."""
        ...

    def on_lost(self, reason: str) -> None:
        """The engine is gone; called once, and nothing is after it."""
        ...


class EngineLink(asyncio.Protocol):
    """Sends commands, hands reports to a listener, and says once when the other end is gone."""

    def __init__(self, listener: EngineListener, exit_reason: Callable[[], str]) -> None:
        self._listener = listener
        self._exit_reason = exit_reason
        self._reader = report_reader()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def connect(
        cls,
        connection: socket.socket,
        listener: EngineListener,
        exit_reason: Callable[[], str],
    ) -> "EngineLink":
        """Takes over *connection*."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(listener, exit_reason), sock=connection)
        return link

    def send(self, commands: Sequence[Command]) -> None:
        """Never blocks; the engine reads them together. To one that is gone they are dropped: its listener was told."""
        if self._transport is None or self._transport.is_closing():
            return
        frames = []
        for command in commands:
            try:
                frames.append(encode(command))
            except Exception as error:
                self._listener.on_unsendable(command, error)
        self._transport.write(b"".join(frames))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # not by inheritance under every event loop

    def data_received(self, data: bytes) -> None:
        """What this raises closes the connection, so that a broken report fails the engine and hangs nobody."""
        for report in self._reader.feed(data):
            self._listener.on_report(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.on_lost(self._exit_reason())
