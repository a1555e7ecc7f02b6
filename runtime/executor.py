"""What runs a step. The engine core knows nothing else of the hardware."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors


class Executor(Protocol):
    """One engine on one device with its KV pool."""

    vocab_size: int

    @property
    def maxima(self) -> NDArray[np.float32] | None:
        """`castline.plugins.contract.LOGITS_MAXIMA` [R, blocks] of the last step, valid as long as its logits."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks (source, destination) in every layer, in order."""
        ...

    def execute(self, step: StepTensors) -> NDArray[np.float32]:
        """Runs one forward pass; logits [R, vocab_size]. The array is valid until the next call. Raises EngineError."""
        ...

    def close(self) -> None: ...


class RehearsingExecutor(Executor, Protocol):
    """One whose steps are not compiled for their shapes: what the first of a shape costs more than others is memory."""

    def rehearse(self, step: StepTensors) -> None:
        """Takes the memory that such a step takes, and writes nothing to the pool. Raises EngineError."""
        ...
