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
