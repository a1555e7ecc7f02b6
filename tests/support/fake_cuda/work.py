"""Work on streams: it takes effect when the host waits for it and not before, in whatever order events leave open."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_cuda.hazards import Clock, Touched
from fake_cuda.memory import Allocation
from fake_cuda.pinned import PinnedBuffer


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes that a piece of work reads or writes: of device memory at an address, or of pinned memory at an offset."""

    address: int
    num_bytes: int
    writes: bool
    pinned: PinnedBuffer | None = None


@dataclass(frozen=True, slots=True)
class Work:
    what: str
    touches: tuple[Touch, ...]
    action: Callable[[], None]
    needs: Callable[[], None] = lambda: None
    """Raises where something that it was made of is gone."""
    queued: Callable[[], None] = lambda: None
    """What happens to memory when it is queued."""
    uses: tuple[Touched, ...] = ()
    """What else must stay until it is done."""


@dataclass(eq=False, slots=True)
class Record:
    """An event, once recorded."""

    stream: int
    clock: Clock
    happened: bool = False


@dataclass(eq=False, slots=True)
class Streams:
    """Queues of actions, by stream."""

    queues: defaultdict[int, deque[Callable[[], None]]] = field(default_factory=lambda: defaultdict(deque))

    def add(self, stream: int, action: Callable[[], None]) -> None:
        self.queues[stream].append(action)

    def record(self, record: Record) -> None:
        def happen() -> None:
            record.happened = True

        self.add(record.stream, happen)

    def wait(self, stream: int, record: Record) -> None:
        self.add(stream, lambda: self.run(record.stream, record))

    def run(self, stream: int, until: Record | None = None) -> None:
        """Executes what is queued, and what that waits for, as far as the event."""
        queue = self.queues[stream]
        while queue and not (until is not None and until.happened):
            queue.popleft()()


Owner = Allocation | PinnedBuffer
