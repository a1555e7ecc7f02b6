"""The loop that owns an engine core: commands in, a step, and out what it has to report. With no work it uses no CPU.

Runs in a process of its own (castline.runtime.engine_process), so that tokenising, JSON and streaming never hold the
interpreter lock while a step wants it.
"""

import select
import socket
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from castline.runtime.core_api import EngineCore
from castline.runtime.core_placement import running_core
from castline.runtime.profiler import Profiler
from castline.runtime.step_profile import NO_MARKS, Phase
from castline.runtime.wire import Abort, Add, Command, Pace, Profile, Report, StepDone, Stop, command_reader, encode

_CHUNK = 1 << 20
STATS_PERIOD_S: Final = 0.1
"""While the engine works its statistics are reported so often, and when it has nothing more to do."""


class Disconnected(Exception):
    """The other side is gone."""


class CommandSocket:
    """Commands from one stream socket, reports to it. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._reader = command_reader()

    def receive(self, *, wait: bool) -> list[Command]:
        """Every command that has arrived; where *wait*, blocks until there is one. Raises Disconnected."""
        commands: list[Command] = []
        while (wait and not commands) or self._readable():
            try:
                data = self._connection.recv(_CHUNK)
            except ConnectionResetError:
                raise Disconnected from None
            if not data:
                raise Disconnected
            commands += self._reader.feed(data)
        return commands

    def send(self, report: Report) -> None:
        """Blocks where the other side has fallen a socket buffer (some hundred kB) behind. Raises Disconnected."""
        try:
            self._connection.sendall(encode(report))
        except (BrokenPipeError, ConnectionResetError):
            raise Disconnected from None

    def send_last(self, report: Report) -> None:
        """Sends, then waits until the other side hangs up.

        Closing at once would lose the report where the other side is writing: its write fails before it has read.
        """
        try:
            self.send(report)
            while True:
                self.receive(wait=True)
        except Disconnected:
            return

    def _readable(self) -> bool:
        return bool(self._arrivals.poll(0))


def run_engine_loop(
    core: EngineCore,
    link: CommandSocket,
    profiler: Profiler | None = None,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Steps *core* until a Stop command. Raises Disconnected when the other side is gone, and what a step raises."""
    marks = profiler or NO_MARKS
    next_stats = since = clock()
    busy_s = 0.0  # until the loop last fell idle; it has had work again *since*
    while True:
        idle = not core.has_work
        if idle:
            busy_s += clock() - since
        commands = link.receive(wait=idle)
        if idle:
            since = clock()
            marks.mark(Phase.IDLE)
        for command in commands:
            if isinstance(command, Add):
                core.add_request(command.request)
            elif isinstance(command, Abort):
                core.abort(command.request_id, command.index)
            elif isinstance(command, Pace):
                core.report_interval = command.report_interval
            elif isinstance(command, Profile):
                assert profiler is not None, "a profile needs an engine that was loaded for it"
                profiler.start()
            elif isinstance(command, Stop):
                return
        if idle and not core.has_work:
            since = clock()  # what the commands took was no work
        marks.mark(Phase.RECEIVE)
        if core.has_work:
            events, stats, runs_on = core.step(), None, None
            if (now := clock()) >= next_stats or not core.has_work:
                stats = replace(core.stats(), busy_s=busy_s + now - since)
                next_stats = now + STATS_PERIOD_S
                runs_on = running_core() if core.has_work else None
            if events or stats:
                link.send(StepDone(events, stats, runs_on))
            marks.mark(Phase.SEND)
            marks.step_done()
