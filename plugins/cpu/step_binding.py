"""What a session's steps read and write: memory that is bound once, and again only where a shape changes.

Binding an input costs more than copying the few integers that a decode has, and most steps have the shapes of the step
before. Tensors that come again, with other numbers in them, are read where they are: that costs nothing at all.

The pool is [blocks, layers, block_bytes], and the graph has a pool of [blocks, block_bytes] for each layer. A layer's
pool is bound as all that follows its first block: its block b is number b x layers from there. Block tables and slots
are numbered so, in memory of their own.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import BLOCK_TABLE, LOGITS, LOGITS_MAXIMA, SLOT_MAPPING, StepTensors, kv_pool_name

Write = Callable[[NDArray[Any], NDArray[Any]], object]
"""Fills its second argument from its first."""


class StepBinding:
    """The inputs and outputs of *session*, a graph over *pool* [blocks, layers, bytes]; the pool is bound for good."""

    def __init__(
        self,
        session: Any,
        inputs: Collection[str],
        pool: NDArray[np.uint8],
        block_size: int,
        vocab_size: int,
        num_maxima: int | None,
    ) -> None:
        """*inputs* are the graph's; *block_size* in tokens; *num_maxima* of a row, where it has LOGITS_MAXIMA."""
        self.native = session.io_binding()
        """To be run."""
        num_blocks, num_layers, block_bytes = pool.shape
        flat = pool.reshape(num_blocks * num_layers, block_bytes)
        for layer in range(num_layers):
            _bind_input(self.native, kv_pool_name(layer), flat[layer : layer + (num_blocks - 1) * num_layers + 1])
        numberings: dict[str, Write] = {
            BLOCK_TABLE: lambda table, out: np.multiply(table, num_layers, out=out),
            SLOT_MAPPING: lambda slots, out: _number_slots(slots, block_size, num_layers, out),
        }
        names = [f.name for f in fields(StepTensors) if f.name in inputs]
        self._numbered = [_Input(self.native, name, numberings[name]) for name in names if name in numberings]
        self._plain = [_Input(self.native, name, _copy) for name in names if name not in numberings]
        self._last: StepTensors | None = None
        self._in_place = False
        self._logits = _Output(self.native, LOGITS, vocab_size)
        self._maxima = None if num_maxima is None else _Output(self.native, LOGITS_MAXIMA, num_maxima)

    def feed(self, tensors: StepTensors) -> None:
        """What the next run reads. *tensors* are copied, unless the last run read the same ones."""
        for bound in self._numbered:
            bound.set(getattr(tensors, bound.name))
        again = tensors is self._last
        if again and self._in_place:
            return
        arrays = [getattr(tensors, bound.name) for bound in self._plain]
        self._in_place = again and all(array.flags.c_contiguous for array in arrays)
        for bound, array in zip(self._plain, arrays, strict=True):
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

    __slots__ = ("_array", "_native", "_shared", "_write", "name")

    def __init__(self, native: Any, name: str, write: Write) -> None:
        """*write* fills bound memory from an array of the caller's."""
        self.name = name
        self._write = write
        self._native = native
        self._array: NDArray[Any] | None = None
        self._shared = False

    def set(self, array: NDArray[Any]) -> None:
        """Reads what is written of *array* now."""
        bound = self._array
        if bound is None or self._shared or bound.shape != array.shape or bound.dtype != array.dtype:
            bound = np.empty(array.shape, array.dtype)
            self._bind(bound, shared=False)
        self._write(array, bound)

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


def _copy(array: NDArray[Any], out: NDArray[Any]) -> None:
    out[:] = array


def _number_slots(slots: NDArray[Any], block_size: int, num_layers: int, out: NDArray[Any]) -> None:
    """Slot block x block_size + offset becomes block x num_layers x block_size + offset; -1, no slot, stays."""
    np.maximum(slots, 0, out=out)
    out //= block_size
    out *= block_size * (num_layers - 1)
    out += slots


def _bind_input(native: Any, name: str, array: NDArray[Any]) -> None:
    native.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
