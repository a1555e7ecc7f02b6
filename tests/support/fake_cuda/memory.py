"""Device memory as byte arrays at addresses that are given out once, with gaps between them."""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fake_cuda.hazards import DriverMisuse, Touched

ALIGNMENT = 256
GAP = 4096
FIRST_ADDRESS = 0x7F_0000_0000
UNWRITTEN = 0xA5
"""Fills memory that nothing was written to."""


@dataclass(eq=False, slots=True)
class Allocation:
    start: int
    end: int
    data: NDArray[np.uint8]
    alive: bool = True
    touched: Touched = field(default_factory=Touched)


class DeviceMemory:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._next = FIRST_ADDRESS
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []

    @property
    def live(self) -> list[Allocation]:
        return [one for one in self._allocations if one.alive]

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(len(one.data) for one in self.live)

    def allocate(self, num_bytes: int) -> int:
        made = Allocation(self._next, self._next + num_bytes, np.full(num_bytes, UNWRITTEN, np.uint8))
        self._starts.append(made.start)
        self._allocations.append(made)
        self._next = -(-(made.end + GAP) // ALIGNMENT) * ALIGNMENT
        return made.start

    def free(self, allocation: Allocation) -> None:
        allocation.alive = False
        allocation.data = allocation.data[:0].copy()

    def at(self, address: int) -> Allocation:
        """The live allocation that begins there."""
        found = self.holding(address, 0, "free")
        if found.start != address:
            raise DriverMisuse(f"{address:#x} is inside an allocation, and not its start")
        return found

    def holding(self, address: int, num_bytes: int, what: str) -> Allocation:
        """The live allocation that has all of those bytes."""
        index = bisect_right(self._starts, address) - 1
        found = self._allocations[index] if index >= 0 else None
        if found is None or (found.alive and address > found.end):
            raise DriverMisuse(f"{what}: {address:#x} is no device memory")
        if not found.alive:
            raise DriverMisuse(f"{what}: use after free of {address:#x}")
        if address + num_bytes > found.end:
            raise DriverMisuse(
                f"{what}: out of bounds: {num_bytes} bytes at {address:#x}, and the allocation has "
                f"{found.end - address} from there"
            )
        return found

    def view(self, address: int, num_bytes: int, what: str = "access") -> NDArray[np.uint8]:
        allocation = self.holding(address, num_bytes, what)
        start = address - allocation.start
        return allocation.data[start : start + num_bytes]
