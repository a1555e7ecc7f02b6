"""The child process of one engine, as its parent sees it. Imports nothing heavy: a start begins here."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from castline.engines.affinity import on_granted_cores
from castline.engines.errors import EngineError
from castline.engines.repository import read_target
from castline.runtime.huge_heap import environment, wanted

if TYPE_CHECKING:
    from castline.runtime.loader import EnginePlan
    from castline.runtime.profile_options import ProfileOptions

_KILLED_S: Final = 2.0
"""What the system may take to clear away a process that was killed."""
_OF_THE_GROUP: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a terminal, a supervisor or a user sends to every process of a server. The process is born with them blocked,
for it cannot ignore them before it runs."""
_QUIET: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""What NumPy's products would run on: threads that spin while a process starts, for what no engine computes."""


class EngineProcess:
    """Of one engine; ``python -m castline.runtime.engine_process``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def spawn(cls, environment: Mapping[str, str] = os.environ) -> tuple["EngineProcess", socket.socket]:
        """Starts a process that waits for Load on the other end of the socket returned."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "castline.runtime.engine_process", str(theirs.fileno())]
        outer = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
        try:
            with theirs, on_granted_cores():
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, outer)
        return cls(process), ours

    @classmethod
    def begin(cls, bundle: Path, huge_pages: str) -> tuple["EngineProcess", socket.socket]:
        """As `spawn`, for the engine in *bundle*, of which nothing is checked yet.

        The process imports what it needs while its load is planned. *huge_pages* as in `LoadOptions`.
        """
        return cls.spawn(_environment(wanted(huge_pages, read_target(bundle))))

    @classmethod
    def start(
        cls, plan: "EnginePlan", profile: "ProfileOptions | None" = None
    ) -> tuple["EngineProcess", socket.socket]:
        """Starts a process that loads an engine from now on. Raises EngineError as `load`."""
        process, connection = cls.spawn(_environment(plan.huge_pages))
        process.load(connection, plan, profile)
        return process, connection

    def load(self, connection: socket.socket, plan: "EnginePlan", profile: "ProfileOptions | None" = None) -> None:
        """Says what to load; the process says Ready or Failed on *connection*.

        Raises EngineError where it has ended before it has heard; whatever is raised, nothing of it is left.
        """
        from castline.runtime.wire import Load, encode  # here: a process begins before its commands are imported

        try:
            connection.sendall(encode(Load(str(plan.bundle), plan.limits, plan.num_threads, plan.huge_pages, profile)))
        except (BrokenPipeError, ConnectionResetError):
            reason = self.exit_reason()
            self.abandon(connection)
            raise EngineError(reason) from None
        except BaseException:
            self.abandon(connection)
            raise

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
        import asyncio  # here: a process begins before it is imported

        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)


def _environment(huge_heap: bool) -> Mapping[str, str]:
    outer = {**_QUIET, **os.environ}
    return environment(outer) if huge_heap else outer
