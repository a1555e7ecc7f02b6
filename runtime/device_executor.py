"""What runs a step on a device that samples for itself: tokens cross the bus, logits only where the host must see them.

Work is handed over with `submit` and taken back with `collect`. A second step may be handed over before the first is
taken back, and it may go on from tokens that only the device knows: while the device computes, the host schedules,
packs and answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors

MAX_IN_FLIGHT = 2
"""Steps submitted and not collected."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One forward pass, and what is to be done with its R rows of logits [R, V]."""

    tensors: StepTensors
    draws: NDArray[Any]
    """[D] of `castline.plugins.cpu.sampling.CHOICE`: rows whose tokens the device chooses. Each row at most once."""
    wanted: NDArray[np.int64]
    """[W] rows whose logits the host gets, in this order."""
    continues: NDArray[np.int32] | None = None
    """[B], only where each sequence has one token (T = B): the token of sequence i is that of draw ``continues[i]`` of
    the step submitted before, or ``tensors.input_ids[i]`` where ``continues[i]`` is -1. None: input_ids hold."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    tokens: NDArray[np.int64]
    """[D]; NO_TOKEN for a row with a NaN or +infinity, or with nothing above -infinity."""
    logits: NDArray[np.float32]
    """[W, V]. Valid until the second `submit` from then on."""


@runtime_checkable
class DeviceExecutor(Protocol):
    """One engine on one device with its KV pool. Owned by one thread. Steps take effect in the order of submission."""

    vocab_size: int

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Queues copies of whole KV blocks (source, destination) in every layer, in order, before the next step."""
        ...

    def submit(self, step: DeviceStep) -> int:
        """Queues a step without waiting for the device; its ticket. Raises EngineError.

        At most `MAX_IN_FLIGHT` tickets are out. The arrays of *step* may be changed as soon as this returns.
        """
        ...

    def collect(self, ticket: int) -> StepOutput:
        """Waits for a step; tickets are collected in order. Raises EngineError where the step failed; its ticket is
        spent then too."""
        ...

    def close(self) -> None:
        """Waits for what is queued and releases the device."""
        ...
