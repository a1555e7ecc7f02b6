"""Whether this host can hold a build, decided before a weight is read. Sizes in bytes."""

from castline.engines.errors import BuildError
from castline.engines.resources import available_memory_bytes

BASE_BYTES = 768 << 20
"""torch, transformers, the exporter's graph and the tokenizer."""
WORKING_COPIES = 3
"""Copies of the largest tensor at one time: as stored, converted, packed."""


def build_bytes(num_parameters: int, largest_tensor: int) -> int:
    """Estimated peak of a build: the fp32 model once, room to work on its largest tensor, and the tools."""
    return 4 * (num_parameters + WORKING_COPIES * largest_tensor) + BASE_BYTES


def require_memory(num_parameters: int, largest_tensor: int) -> None:
    """Raises BuildError naming the estimate and what there is, where the build cannot fit."""
    needed, available = build_bytes(num_parameters, largest_tensor), available_memory_bytes()
    if needed > available:
        raise BuildError(
            f"load: building {num_parameters / 1e6:,.0f}M parameters in fp32 needs about {needed / 2**30:.1f} GiB of "
            f"memory, {available / 2**30:.1f} GiB are available; build on a larger host (the engine itself needs less)"
        )
