"""A plan of TensorRT as the runtime uses it. `castline.plugins.tensorrt.plan_engine` has the real one; tests have one
whose layers are kernels of a driver in memory.

Nothing is allocated and nothing is compiled once the contexts have been made: their scratch memory is the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

MIXED: Final = 0
DECODE: Final = 1
"""Optimization profiles of a plan, by index."""
PLAN_NAME: Final = "model.plan"
"""Of the plan in a bundle."""


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or an output of a plan."""

    is_input: bool
    dtype: str
    """TensorRT's name of it in small letters: ``float``, ``int32``, ``int8``."""
    shape: tuple[int, ...]
    """Largest that the mixed profile takes; of an output as the plan has it, -1 where it varies."""


class PlanContext(Protocol):
    """One profile of a plan, ready to run. It keeps what it was given last."""

    def bind(self, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
        """Where a tensor lies, aligned to 256 bytes, and, of an input, its shape. Raises EngineError."""
        ...

    def enqueue(self, stream: int) -> None:
        """Queues one forward pass: no allocation, no waiting. Raises EngineError."""
        ...


class PlanEngine(Protocol):
    """A plan on a device."""

    tensors: Mapping[str, PlanTensor]
    """By name."""
    scratch_bytes: int
    """Device memory that a forward pass of any profile works in. Contexts whose passes never overlap may share it."""

    def create_context(self, profile: int, scratch: int, stream: int, *, fixed_shapes: bool) -> PlanContext:
        """*scratch* is the address of `scratch_bytes` bytes; *fixed_shapes*: every pass will have the shapes of the
        first. Raises EngineError."""
        ...

    def close(self) -> None:
        """Releases the contexts and the plan. Nothing of it may be queued."""
        ...
