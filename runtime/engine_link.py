"""The serving side's end of the socket to the engine process, inside an event loop."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, cast

from castline.engines.errors import EngineError
from castline.runtime import huge_pages
from castline.runtime.loader import EnginePlan
from castline.runtime.step_profile import ProfileOptions
from castline.runtime.wire import Command, Load, Report, encode, report_reader

_KILLED_S: Final = 2.0
"""What the system may take to clear away a process that was killed."""


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


class EngineProcess:
    """The child process of one engine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def spawn(cls, environment: Mapping[str, str] = os.environ) -> tuple["EngineProcess", socket.socket]:
        """Starts a process that waits for Load on the other end of the socket returned."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "castline.runtime.engine_process", str(theirs.fileno())]
        try:
            with theirs:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                )
        except BaseException:
            ours.close()
            raise
        return cls(process), ours

    @classmethod
    def load(cls, plan: EnginePlan, profile: ProfileOptions | None = None) -> tuple["EngineProcess", socket.socket]:
        """Starts a process that loads an engine from now on; it says Ready or Failed on the socket returned.

        Raises EngineError where it ends before it has heard what to load.
        """
        process, connection = cls.spawn(huge_pages.environment(os.environ) if plan.huge_pages else os.environ)
        try:
            connection.sendall(encode(Load(str(plan.bundle), plan.limits, plan.num_threads, plan.huge_pages, profile)))
        except (BrokenPipeError, ConnectionResetError):
            reason = process.exit_reason()
            process.abandon(connection)
            raise EngineError(reason) from None
        except BaseException:
            process.abandon(connection)
            raise
        return process, connection

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_reason(self) -> str:
        """Why the process is gone, in words. Its socket has closed, so it is ending if it has not ended."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection"
        if status == -signal.SIGKILL:
            return "the engine process was killed by signal 9, as the kernel does when memory runs out"
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the engine process {cause}; its log says why"

    def kill(self) -> None:
        self._process.kill()

    def abandon(self, connection: socket.socket) -> None:
        """Nobody will talk to it: ends it, and leaves nothing of it in this process."""
        connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver
            self._process.wait(_KILLED_S)

    async def stop(self, timeout_s: float) -> None:
        """Waits for the process to end by itself; kills it after *timeout_s*."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
