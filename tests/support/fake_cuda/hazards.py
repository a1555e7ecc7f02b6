"""Who touches which bytes when, and whether anything orders it: vector clocks over streams and the host.

A stream's clock counts its work. Work happens before other work where the other's clock has reached its count: on the
same stream, through an event, or because the host waited for it before it queued the other.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = dict[int, int]
"""Stream → how much of its work has happened before."""
KEPT = 12
"""Accesses of one piece of memory that are remembered before those that the host has waited for are forgotten."""


class DriverMisuse(AssertionError):
    """The driver was told something that a GPU would answer with wrong data, a fault or a crash."""


@dataclass(frozen=True, slots=True)
class Access:
    start: int
    end: int
    writes: bool
    stream: int
    count: int
    what: str


@dataclass(eq=False, slots=True)
class Touched:
    """Accesses of one piece of memory by work on streams; offsets are from its start."""

    accesses: dict[tuple[int, int, bool, int], Access] = field(default_factory=dict)
    """The latest of each range, kind and stream: a stream's own work is in order."""

    def check(self, start: int, end: int, writes: bool, clock: Clock, what: str) -> None:
        """Raises DriverMisuse where *what* is not ordered after an access that it conflicts with."""
        for one in self.accesses.values():
            if one.start < end and start < one.end and (writes or one.writes) and clock.get(one.stream, 0) < one.count:
                did, does = ("writes" if kind else "reads" for kind in (one.writes, writes))
                raise DriverMisuse(
                    f"unsynchronised: {what} {does} bytes {start}..{end}, and nothing orders it after {one.what} on "
                    f"stream {one.stream}, which {did} bytes {one.start}..{one.end}"
                )

    def add(self, access: Access, host: Clock) -> None:
        self.accesses[access.start, access.end, access.writes, access.stream] = access
        if len(self.accesses) > KEPT:
            self.accesses = {k: a for k, a in self.accesses.items() if host.get(a.stream, 0) < a.count}

    def busy(self, host: Clock) -> Access | None:
        """An access that the host has not waited for."""
        return next((a for a in self.accesses.values() if host.get(a.stream, 0) < a.count), None)


class Timeline:
    def __init__(self) -> None:
        self.host: Clock = {}
        self._streams: defaultdict[int, Clock] = defaultdict(dict)

    def queue(self, stream: int) -> Clock:
        """The clock of the next work on *stream*, which the host queues now."""
        clock = self._streams[stream]
        merge(clock, self.host)
        clock[stream] = clock.get(stream, 0) + 1
        return dict(clock)

    def order(self, stream: int, after: Clock) -> None:
        """Work on *stream* from now on comes after that."""
        merge(self._streams[stream], after)

    def waited(self, stream: int) -> None:
        """The host has waited for all of a stream."""
        merge(self.host, self._streams[stream])

    def is_idle(self, stream: int) -> bool:
        """The host has waited for everything queued."""
        return self.host.get(stream, 0) >= self._streams[stream].get(stream, 0)


@contextmanager
def misuse(words: str) -> Iterator[None]:
    """The block must be refused with *words* in the message."""
    try:
        yield
    except DriverMisuse as error:
        if words not in str(error):
            raise AssertionError(f"refused with {error!s}, and not for {words!r}") from error
        return
    raise AssertionError(f"not refused: {words}")


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count
