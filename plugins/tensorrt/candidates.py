"""Shapes that a kernel may be compiled with, and their order by what the compiled kernels say of themselves.

The order is an estimate: it stands until a GPU of the kind has timed the candidates. Decode is bound by memory, so it
wants enough loads in flight on every multiprocessor (Little's law: bandwidth times latency); prefill is bound by the
tensor cores, so it wants many query rows to share each load of keys; the sampler's one program a row wants few steps.
"""

from dataclasses import dataclass
from typing import Final

from castline.engines.kernel_choices import KernelChoice, TunedKernel
from castline.engines.sku import Sku
from castline.plugins.tensorrt.kernel_set import KernelSpec
from castline.plugins.tensorrt.occupancy import resident_blocks

MEMORY_LATENCY_S: Final = 8e-7
"""Of a load from device memory while the memory is busy."""
PROGRAMS: Final = 2
"""Of a decode on a multiprocessor (`castline.plugins.tensorrt.launcher.WAVES`)."""
TYPICAL_KV_HEADS: Final = 8
ENOUGH_WARPS: Final = 16
"""On a multiprocessor, for one to run while others wait."""

_DECODE: Final = tuple(
    (tile, warps, stages) for tile, warps in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)) for stages in (2, 3)
)
_PREFILL: Final = tuple(
    (rows, tile, warps, stages)
    for rows, warps in ((32, 4), (64, 4), (64, 8), (128, 8))
    for tile, stages in ((32, 2), (32, 3), (64, 2))
)
_SAMPLING: Final = ((1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16))


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is tuned: a kernel for one type and size of keys and values; neither of greedy and sample."""

    kernel: TunedKernel
    kv_dtype: str = ""
    head_dim: int = 0

    def candidates(self, chosen: str) -> list[KernelChoice]:
        if self.kernel == "prefill":
            return [self._choice(tile, warps, stages, chosen, rows) for rows, tile, warps, stages in _PREFILL]
        if self.kernel in ("decode", "decode_split"):
            return [self._choice(tile, warps, stages, chosen) for tile, warps, stages in _DECODE]
        return [self._choice(chunk, warps, 1, chosen) for chunk, warps in _SAMPLING]

    def _choice(self, tile: int, warps: int, stages: int, chosen: str, rows: int = 64) -> KernelChoice:
        return KernelChoice(
            self.kernel, tile, warps, stages, chosen, self.kv_dtype, self.head_dim, rows  # type: ignore[arg-type]
        )  # fmt: skip


def estimate(choice: KernelChoice, spec: KernelSpec, sku: Sku) -> tuple[float, ...]:
    """Higher is better, within one kernel. *spec* is the candidate, compiled for the SKU."""
    major, minor = map(int, sku.compute_capability.split("."))
    resident = resident_blocks((major, minor), spec.registers, spec.shared_bytes, spec.num_warps)
    warps = resident * choice.num_warps
    if choice.kernel == "prefill":
        return min(warps, ENOUGH_WARPS // 2), choice.rows, min(warps, ENOUGH_WARPS), choice.tile, -choice.num_stages
    if choice.kernel in ("greedy", "sample"):
        return choice.tile, choice.num_warps
    needed = sku.bytes_per_s / sku.sm_count * MEMORY_LATENCY_S
    of_a_tile = 2 * choice.tile * choice.head_dim * (1 if choice.kv_dtype == "fp8" else 2)
    flight = min(resident, PROGRAMS) * (choice.num_stages - 1) * of_a_tile
    return min(flight, needed), min(warps, ENOUGH_WARPS), min(resident, 2 * PROGRAMS), choice.tile, -choice.num_stages


def enough_splits(sku: Sku) -> int:
    """Parts that let one sequence of a typical model fill the GPU; a power of two."""
    wanted = -(-PROGRAMS * sku.sm_count // TYPICAL_KV_HEADS)
    return max(16, 1 << (wanted - 1).bit_length())
