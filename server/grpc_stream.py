"""The messages of one streamed call. Those that can be sent at once wake no task."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from grpc.aio import ServicerContext


class MessageStream:
    """Sends one message after the other, as `grpc.aio` wants it, in the order of the calls."""

    def __init__(self, context: ServicerContext) -> None:
        self._context = context
        self._sending: Coroutine[asyncio.Future[None], None, None] | None = None
        """A write that no task awaits."""
        self._error: Exception | None = None
        """What it raised, for the task that answers the call."""
        self._sent: asyncio.Future[None] | None = None
        """That task waits for it."""

    @property
    def can_send(self) -> bool:
        """False while the last message is on its way."""
        return self._sending is None and self._error is None

    def send_now(self, message: Any) -> None:
        """Begins to send; only where ``can_send``."""
        self._sending = self._context.write(message)
        self._go_on(None)

    def _go_on(self, _: asyncio.Future[None] | None) -> None:
        """The write goes on until it waits for a future again: what a task does, less the turns of the event loop."""
        assert self._sending is not None
        try:
            self._sending.send(None).add_done_callback(self._go_on)
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._sending, self._error = None, error
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    async def send(self, message: Any) -> None:
        await self.flush()
        await self._context.write(message)

    async def flush(self) -> None:
        """Waits until the last message has left. Raises what its write raised."""
        if self._sending is not None:
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent
        if self._error is not None:
            raise self._error
