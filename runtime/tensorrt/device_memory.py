"""Everything that an executor has on a device, made at start-up and released together."""

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import Driver

MIB = 1 << 20


class DeviceMemory:
    """Buffers, pinned memory, events and one stream of a driver. `close` releases them, the latest first."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._made = ExitStack()

    def allocate(self, what: str, num_bytes: int) -> int:
        """Device memory. Raises EngineError saying what it was for."""
        try:
            address = self._driver.allocate(num_bytes)
        except EngineError as error:
            raise EngineError(
                f"{num_bytes / MIB:.1f} MiB of device memory for {what} cannot be had ({error}): lower "
                "--memory-utilization, --kv-blocks, --max-num-batched-tokens or --max-num-seqs"
            ) from error
        self._made.callback(self._driver.free, address)
        return address

    def allocate_pinned(self, what: str, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies use asynchronously. Raises EngineError saying what it was for."""
        try:
            memory = self._driver.allocate_pinned(num_bytes)
        except EngineError as error:
            raise EngineError(
                f"{num_bytes / MIB:.1f} MiB of page-locked memory for {what} cannot be had ({error}): raise the limit "
                "of locked memory, or lower --max-num-batched-tokens"
            ) from error
        self._made.callback(self._driver.free_pinned, memory)
        return memory

    def require_room(self, scratch: int, planned: int, pools: int, buffers: int, num_blocks: int) -> None:
        """For scratch memory beyond what was *planned*, beside *pools* of *num_blocks* and *buffers*, all to come and
        in bytes: it is taken from what the plan left unused. Raises EngineError where that is not enough."""
        free, _ = self._driver.memory()
        if scratch <= planned or scratch + pools + buffers <= free:
            return
        fitting = max(0, free - scratch - buffers) * num_blocks // pools
        cure = (
            f"give --kv-blocks {fitting}, or lower --memory-utilization"
            if fitting
            else ("rebuild the engine with a lower --max-num-batched-tokens, which that memory is for")
        )
        raise EngineError(
            f"TensorRT asks for {scratch / MIB:.1f} MiB to work in, where {planned / MIB:.1f} MiB were planned, and "
            f"with {pools / MIB:.1f} MiB of KV pool and {buffers / MIB:.1f} MiB of a step's buffers that is more than "
            f"the {free / MIB:.1f} MiB that are free: {cure}"
        )

    def create_stream(self) -> int:
        stream = self._driver.create_stream()
        self._made.callback(self._driver.destroy_stream, stream)
        return stream

    def create_event(self) -> int:
        event = self._driver.create_event()
        self._made.callback(self._driver.destroy_event, event)
        return event

    def close(self) -> None:
        """Nothing may be queued. A second call does nothing."""
        self._made.close()
