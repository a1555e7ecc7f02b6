"""How many copies of a kernel a multiprocessor holds at once, from what its cubin says: no GPU is asked.

Figures are those of the CUDA C++ Programming Guide, technical specifications by compute capability.
"""

from dataclasses import dataclass
from typing import Final

REGISTERS: Final = 65_536
"""Of a multiprocessor, by every compute capability here."""
REGISTER_UNIT: Final = 256
"""Registers are given to a warp in multiples."""
RESERVED_SHARED: Final = 1024
"""Shared memory that the system keeps of each block."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    warps: int
    blocks: int
    shared_bytes: int


MULTIPROCESSORS: Final = {
    (8, 0): Multiprocessor(64, 32, 164 << 10),
    (8, 6): Multiprocessor(48, 16, 100 << 10),
    (8, 9): Multiprocessor(48, 24, 100 << 10),
    (9, 0): Multiprocessor(64, 32, 228 << 10),
    (10, 0): Multiprocessor(64, 32, 228 << 10),
    (10, 3): Multiprocessor(64, 32, 228 << 10),
    (12, 0): Multiprocessor(48, 24, 100 << 10),
    (12, 1): Multiprocessor(48, 24, 100 << 10),
}


def resident_blocks(compute_capability: tuple[int, int], registers: int, shared_bytes: int, num_warps: int) -> int:
    """Blocks that run on a multiprocessor at a time; *registers* are those of a thread."""
    unit = MULTIPROCESSORS[compute_capability]
    of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // of_a_warp // num_warps if registers else unit.blocks
    by_shared = unit.shared_bytes // (shared_bytes + RESERVED_SHARED)
    return min(unit.blocks, unit.warps // num_warps, by_registers, by_shared)
