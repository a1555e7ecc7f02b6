"""The engine process: ``python -m castline.runtime.engine_process FD`` loads one engine and runs its loop.

FD is a stream socket to the serving process. The first command is Load; the answer is Ready, or Failed with the reason.
The process ends when told to, or when the socket closes: an engine never outlives its server. SIGINT, SIGTERM and
SIGUSR1, which may be sent to the whole group, are blocked from its birth (`castline.runtime.engine_child`): the
server drains first, then stops the engine.
"""

import ctypes
import gc
import logging
import signal
import socket
import sys
from pathlib import Path

from castline.engines.errors import CastlineError, EngineError
from castline.runtime.engine_loop import CommandSocket, Disconnected, run_engine_loop
from castline.runtime.profiler import Profiler
from castline.runtime.startup import load_core
from castline.runtime.step_profile import NO_MARKS
from castline.runtime.wire import Failed, Load, Ready

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("castline.engine")


def serve(link: CommandSocket) -> int:
    """Loads, then loops. Returns the exit status."""
    try:
        load = link.receive(wait=True)[0]
        assert isinstance(load, Load), load
        profiler = Profiler(load.profile, _profile_lost) if load.profile is not None else None
        core, executor = load_core(
            Path(load.bundle), load.limits, load.num_threads, profiler or NO_MARKS, huge_pages=load.huge_pages
        )
        if profiler is not None:
            profiler.attach(executor, load.limits)
            profiler.start()
        gc.collect()
        gc.freeze()  # what lives for ever is not walked again: a full collection would pause a step
        link.send(Ready())
        try:
            run_engine_loop(core, link, profiler)
        finally:
            if profiler is not None:
                profiler.finish()
            core.close()
            executor.close()
    except Disconnected:
        return 0
    except BaseException as error:
        if not isinstance(error, CastlineError):
            _log.exception("the engine loop broke")
        _report(link, error)
        return 1
    return 0


def _profile_lost(error: EngineError) -> None:
    """Nobody's request is worth a profile less."""
    _log.error("%s (SIGUSR1 to the server)", error)


def _report(link: CommandSocket, error: BaseException) -> None:
    reason = str(error) if isinstance(error, CastlineError) else f"{type(error).__name__}: {error}"
    link.send_last(Failed(reason))


def _end_with_parent() -> None:
    """The socket tells a loop that reads it; one that hangs in a step is killed when the serving process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(serve(CommandSocket(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
