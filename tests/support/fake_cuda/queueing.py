"""Work from the moment it is queued: are its bytes there, does anything order it, and when does it take effect."""

from fake_cuda.hazards import Access, DriverMisuse, Timeline, Touched, merge
from fake_cuda.memory import DeviceMemory
from fake_cuda.pinned import PinnedBuffer
from fake_cuda.work import Owner, Record, Streams, Touch, Work


class WorkQueue:
    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._time = Timeline()
        self._actions = Streams()

    def enqueue(self, stream: int, work: Work, *uses: Touched) -> None:
        """*uses*: what must stay until it is done, beside what the work says."""
        work.needs()
        owners = [(touch, *self.owner(touch, work.what)) for touch in work.touches]
        clock = self._time.queue(stream)
        for touch, owner, start in owners:
            owner.touched.check(start, start + touch.num_bytes, touch.writes, clock, work.what)
        for touch, owner, start in owners:
            self._note(owner.touched, start, touch, stream, clock[stream], work.what)
        for used in (*work.uses, *uses):
            self._note(used, 0, _WHOLE, stream, clock[stream], work.what)
        work.queued()
        self._actions.add(stream, work.action)

    def owner(self, touch: Touch, what: str) -> tuple[Owner, int]:
        """What the bytes belong to, and where they begin in it."""
        if touch.pinned is not None:
            if not touch.pinned.alive:
                raise DriverMisuse(f"{what}: use after free of pinned memory")
            return touch.pinned, touch.address
        allocation = self._device.holding(touch.address, touch.num_bytes, what)
        return allocation, touch.address - allocation.start

    # Streams and events

    def is_idle(self, stream: int) -> bool:
        return self._time.is_idle(stream)

    def synchronize(self, stream: int) -> None:
        self._actions.run(stream)
        self._time.waited(stream)

    def record(self, stream: int) -> Record:
        record = Record(stream, self._time.queue(stream))
        self._actions.record(record)
        return record

    def wait(self, stream: int, record: Record) -> None:
        self._time.order(stream, record.clock)
        self._actions.wait(stream, record)

    def synchronize_record(self, record: Record) -> None:
        self._actions.run(record.stream, record)
        merge(self._time.host, record.clock)

    def has_happened(self, record: Record) -> bool:
        """And the host knows it."""
        return self._time.host.get(record.stream, 0) >= record.clock[record.stream]

    # The host

    def not_busy(self, touched: Touched, what: str) -> None:
        user = touched.busy(self._time.host)
        if user is not None:
            raise DriverMisuse(f"{what}: {user.what} on stream {user.stream} is queued and uses it")

    def check_host(self, buffer: PinnedBuffer, start: int, end: int, writes: bool) -> None:
        """The host is about to read or to write those bytes."""
        if not buffer.alive:
            raise DriverMisuse("the host touches pinned memory that was freed")
        buffer.touched.check(start, end, writes, self._time.host, "the host")

    def _note(self, touched: Touched, start: int, touch: Touch, stream: int, count: int, what: str) -> None:
        access = Access(start, start + touch.num_bytes, touch.writes, stream, count, what)
        touched.add(access, self._time.host)


_WHOLE = Touch(0, 1, False)
"""Of something that is used as a whole: a module, a graph."""
