"""What a run reads: the memory that was bound, whatever the caller does with his arrays."""

import ctypes
from dataclasses import fields, replace
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors
from castline.plugins.cpu.step_binding import StepBinding

NAMES = [f.name for f in fields(StepTensors)]
LAYERS, BLOCK_SIZE = 3, 16


class NativeBinding:
    """Stands in for ONNX Runtime's: remembers addresses, and reads from them when a step is run."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[Any, tuple[int, ...], int]] = {}
        self.num_bindings = 0

    def io_binding(self) -> "NativeBinding":
        return self

    def bind_input(self, name: str, _device: str, _index: int, dtype: Any, shape: tuple[int, ...], at: int) -> None:
        self.bound[name] = (dtype, shape, at)
        self.num_bindings += 1

    def reads(self, name: str) -> list[Any]:
        dtype, shape, at = self.bound[name]
        size = prod(shape) * np.dtype(dtype).itemsize
        read: list[Any] = np.frombuffer(ctypes.string_at(at, size), dtype).reshape(shape).tolist()
        return read


@pytest.fixture
def native() -> NativeBinding:
    return NativeBinding()


@pytest.fixture
def binding(native: NativeBinding) -> StepBinding:
    return StepBinding(native, NAMES, np.zeros((2, LAYERS, 4), np.uint8), BLOCK_SIZE, 8, None)


def tensors_of(rng: np.random.Generator, count: int) -> StepTensors:
    def numbers(*shape: int) -> NDArray[np.int32]:
        return rng.integers(-1, 1000, shape).astype(np.int32)

    long = [numbers(count).astype(np.int64) for _ in range(3)]
    return StepTensors(long[0], long[1], numbers(count), numbers(count + 1), numbers(count), numbers(count, 3), long[2])


def numbered(name: str, values: NDArray[Any]) -> list[Any]:
    """What the graph is to read: blocks and slots are counted over all layers."""
    if name == "block_table":
        return (values * LAYERS).tolist()  # type: ignore[no-any-return]
    if name == "slot_mapping":
        block, offset = np.divmod(values, BLOCK_SIZE)
        return np.where(values < 0, values, block * LAYERS * BLOCK_SIZE + offset).tolist()  # type: ignore[no-any-return]
    return values.tolist()  # type: ignore[no-any-return]


def test_every_run_reads_the_tensors_it_was_given(native: NativeBinding, binding: StepBinding) -> None:
    """Tensors that come again are read in place: with the numbers of now, and never written by those that follow."""
    rng = np.random.default_rng(5)
    known = [tensors_of(rng, count) for count in (2, 2, 3)]
    kept = {id(tensors): {name: array.copy() for name, array in tensors.feeds().items()} for tensors in known}
    for _ in range(200):
        tensors = known[int(rng.integers(len(known)))]
        for _ in range(int(rng.integers(1, 5))):
            if rng.random() < 0.5:
                tensors.positions[:] += 1
                kept[id(tensors)]["positions"] += 1
            binding.feed(tensors)
            for name in NAMES:
                assert native.reads(name) == numbered(name, kept[id(tensors)][name]), name
    for tensors in known:
        for name, array in tensors.feeds().items():
            np.testing.assert_array_equal(array, kept[id(tensors)][name])


def test_tensors_that_stay_are_bound_once(native: NativeBinding, binding: StepBinding) -> None:
    """Binding seven inputs costs a decode step as much as its sampling."""
    tensors = tensors_of(np.random.default_rng(1), 4)
    binding.feed(tensors)
    binding.feed(tensors)
    before = native.num_bindings
    for _ in range(5):
        binding.feed(tensors)
    assert native.num_bindings == before


def test_strided_tensors_that_stay_are_read_anew(native: NativeBinding, binding: StepBinding) -> None:
    """A strided array cannot be bound, and a copy of it would keep the numbers of the step it was made in."""
    wide = np.arange(8, dtype=np.int64)
    tensors = replace(tensors_of(np.random.default_rng(2), 4), positions=wide[::2])
    for _ in range(4):
        wide += 10
        binding.feed(tensors)
        assert native.reads("positions") == wide[::2].tolist()
