"""What a session's steps read and write: memory that is bound once, and again only where a shape changes.

Binding an input costs more than copying the few integers that a decode has, and most steps have the shapes of the step
before. Tensors that come again, with other numbers in them, are read where they are: that costs nothing at all.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import LOGITS, LOGITS_MAXIMA, StepTensors, kv_pool_name


class StepBinding:
    """The inputs and outputs of *session*, a graph over *pool* [layers, ...]; the pool is bound for good."""

    def __init__(
        self, session: Any, inputs: Collection[str], pool: NDArray[np.uint8], vocab_size: int, num_maxima: int | None
    ) -> None:
        """*inputs* are the graph's; *num_maxima* of a row, where it has the output LOGITS_MAXIMA."""
        self.native = session.io_binding()
        """To be run."""
        for layer, blocks in enumerate(pool):
            _bind_input(self.native, kv_pool_name(layer), blocks)
        self._inputs = [_Input(self.native, f.name) for f in fields(StepTensors) if f.name in inputs]
        self._last: StepTensors | None = None
        self._in_place = False
        self._logits = _Output(self.native, LOGITS, vocab_size)
        self._maxima = None if num_maxima is None else _Output(self.native, LOGITS_MAXIMA, num_maxima)

    def feed(self, tensors: StepTensors) -> None:
        """What the next run reads. *tensors* are copied, unless the last run read the same ones."""
        again = tensors is self._last
        if again and self._in_place:
            return
        arrays = [getattr(tensors, bound.name) for bound in self._inputs]
        self._in_place = again and all(array.flags.c_contiguous for array in arrays)
        for bound, array in zip(self._inputs, arrays, strict=True):
            if self._in_place:
                bound.share(array)
            else:
                bound.set(array)
        self._last = tensors

    def outputs(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Where the next run writes logits and maxima: the same arrays while *rows* stay the same."""
        return self._logits.of(rows), None if self._maxima is None else self._maxima.of(rows)


class _Input:
    """An input of the graph."""

    __slots__ = ("_array", "_native", "_shared", "name")

    def __init__(self, native: Any, name: str) -> None:
        self.name = name
        self._native = native
        self._array: NDArray[Any] | None = None
        self._shared = False

    def set(self, array: NDArray[Any]) -> None:
        """Reads a copy of *array*."""
        bound = self._array
        if bound is not None and not self._shared and bound.shape == array.shape and bound.dtype == array.dtype:
            bound[:] = array
        else:
            self._bind(array.copy(order="C"), shared=False)

    def share(self, array: NDArray[Any]) -> None:
        """Reads *array*, which is contiguous, itself: whatever is in it when the graph is run."""
        self._bind(array, shared=True)

    def _bind(self, array: NDArray[Any], *, shared: bool) -> None:
        self._array, self._shared = array, shared
        _bind_input(self._native, self.name, array)


class _Output:
    """A float output [rows, width] of the graph, in memory that only grows."""

    __slots__ = ("_array", "_memory", "_name", "_native", "_width")

    def __init__(self, native: Any, name: str, width: int) -> None:
        self._native = native
        self._name = name
        self._width = width
        self._memory = np.empty(width, np.float32)
        self._array: NDArray[np.float32] | None = None

    def of(self, rows: int) -> NDArray[np.float32]:
        """Bound, so that the next run writes it."""
        if self._array is None or len(self._array) != rows:
            if rows * self._width > self._memory.size:
                self._memory = np.empty(rows * self._width, np.float32)
            self._array = self._memory[: rows * self._width].reshape(rows, self._width)
            shape = self._array.shape
            self._native.bind_output(self._name, "cpu", 0, np.float32, shape, self._memory.ctypes.data)
        return self._array


def _bind_input(native: Any, name: str, array: NDArray[Any]) -> None:
    native.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
