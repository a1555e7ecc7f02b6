"""A system's processes as one group: started in a session of their own; signalled, weighed, timed together. Linux."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STOP_SECONDS = 15.0
SIGNAL_SECONDS = 5.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Group:
    """The processes of one system. Its first process leads a session, which is how the others are found."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, command: Sequence[str], log: Path, environment: Mapping[str, str], *, talks: bool = False
    ) -> "Group":
        """Starts *command*; both outputs go to *log*, or, where it *talks*, its standard output is a pipe."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """Of the session, those that still run."""
        leader = self.process.pid
        stats = ((pid, _stat(pid)) for pid in _all_pids())
        return [pid for pid, stat in stats if stat is not None and int(stat[3]) == leader and stat[0] != "Z"]

    def suspend(self) -> None:
        """Stops every process where it is, so that an idle system takes nothing from the one that is measured.

        Returns when they have stopped: a busy thread stops only when it next runs.
        """
        self._signal(signal.SIGSTOP)
        self._wait_for(lambda: all(_is_stopped(pid) for pid in self.pids()))

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def memory_bytes(self) -> int:
        """What the group keeps resident, each page once, as if it ran alone.

        The proportional set size of its anonymous memory, which only relatives share; and of each mapped piece of a
        file (weights, libraries) the most that one process has: other systems may map the same file, and would halve
        its proportional size.
        """
        anonymous, files = 0, dict[str, int]()
        for pid in self.pids():
            for piece in _memory(pid):
                if piece.file is None:
                    anonymous += piece.pss
                else:
                    files[piece.file] = max(files.get(piece.file, 0), piece.rss)
        return anonymous + sum(files.values())

    def cpu_seconds(self) -> float:
        """Processor time of the processes that run, user and system."""
        return sum(self.cpu_seconds_by_process().values())

    def cpu_seconds_by_process(self) -> dict[int, float]:
        """By process id. The system counts in ticks, of a hundredth of a second as a rule."""
        stats = ((pid, _stat(pid)) for pid in self.pids())
        return {pid: (int(stat[11]) + int(stat[12])) / TICKS for pid, stat in stats if stat is not None}

    def stop(self) -> None:
        """Ends every process: asked first, then made to."""
        self.resume()
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._wait_for(lambda: not self.pids())
        pipes: list[IO[bytes] | None] = [self.process.stdin, self.process.stdout]
        for pipe in pipes:
            if pipe is not None:
                pipe.close()

    def last_words(self, lines: int = 3) -> str:
        """The end of the log, in one line."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-160 * lines :]

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        """Signals take effect when a process next runs; gives up quietly."""
        deadline = time.monotonic() + SIGNAL_SECONDS
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state is 0, session 3, utime 11, stime 12."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _is_stopped(pid: int) -> bool:
    """Or gone."""
    stat = _stat(pid)
    return stat is None or stat[0] == "T"


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """A mapping of a process; ``file`` names device, inode and offset, None for anonymous memory. In bytes."""

    file: str | None
    rss: int
    pss: int


def parse_memory(smaps: str) -> list[MemoryPiece]:
    """From the text of /proc/PID/smaps."""
    pieces = []
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        _, _, offset, device, inode, *_ = block.split("\n", 1)[0].split()
        sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(Rss|Pss): +(\d+) kB", block, re.MULTILINE)}
        file = None if inode == "0" else f"{device} {inode} {offset}"
        pieces.append(MemoryPiece(file, sizes.get("Rss", 0), sizes.get("Pss", 0)))
    return pieces


def _memory(pid: int) -> list[MemoryPiece]:
    try:
        return parse_memory(Path(f"/proc/{pid}/smaps").read_text(errors="replace"))
    except OSError:
        return []
