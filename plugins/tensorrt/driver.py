"""The CUDA driver as castline uses it: the only door to a GPU. `CudaDriver` is the real one; tests have one in memory.

Addresses, streams, events, modules, functions and graphs are integers that the driver gave out. A copy on a stream is
asynchronous: its host memory must stay as it is, and its result may not be read, until the stream was synchronised.
Every method raises EngineError with the driver's own words where a call fails.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LaunchValue = int | float


class Driver(Protocol):
    # Device memory

    def allocate(self, num_bytes: int) -> int:
        """Address of device memory, aligned to 256 bytes."""
        ...

    def free(self, address: int) -> None: ...

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory [num_bytes], which copies may use asynchronously."""
        ...

    def free_pinned(self, memory: NDArray[np.uint8]) -> None: ...

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        """Asynchronous; *source* is pinned memory, or a view of it."""
        ...

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        """Asynchronous; *target* is pinned memory, or a view of it."""
        ...

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """Sets bytes."""
        ...

    # Streams and events

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Waits for everything queued on the stream."""
        ...

    def create_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None:
        """Work queued on *stream* from now on begins after *event*."""
        ...

    def synchronize_event(self, event: int) -> None: ...

    def elapsed_ms(self, start: int, end: int) -> float:
        """Between two recorded events that have happened."""
        ...

    # Kernels

    def load_module(self, cubin: bytes) -> int: ...

    def unload_module(self, module: int) -> None: ...

    def function(self, module: int, entry: str, shared_bytes: int) -> int:
        """The kernel *entry*, allowed that much dynamic shared memory."""
        ...

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[tuple[str, LaunchValue]],
    ) -> None:
        """*arguments* are (type, value) with the types of `castline.plugins.tensorrt.kernel_set.ArgumentType`."""
        ...

    # Graphs

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> int:
        """The captured graph, instantiated."""
        ...

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...

    # Device

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        ...

    def close(self) -> None:
        """Releases the context. Everything allocated must have been freed."""
        ...
