"""Chains of Reshape, Transpose, Squeeze and Unsqueeze, understood by running them on numbered elements.

The exporter moves heads around in many equivalent ways; whether a chain is the one wanted is decided by what it does
to an array, and not by how it is spelled.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.passes.walk import attribute, ints

TOKENS = 5
"""Stands for T; divides no usual head size, so that no reshape passes by accident."""
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


def origin(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """The value at the start of the chain that ends in *value*, and the chain from there on."""
    chain: list[ir.Node] = []
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _MOVES and node.inputs[0] is not None:
        chain.append(node)
        value = node.inputs[0]
        node = value.producer()
    return value, chain[::-1]


def run_chain(chain: list[ir.Node], array: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """*array* after the chain; None where a step is not known at build time."""
    for node in chain:
        moved = _move(node, array)
        if moved is None:
            return None
        array = moved
    return array


def _move(node: ir.Node, array: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if node.op_type == "Identity":
        return array
    if node.op_type == "Transpose":
        perm = attribute(node, "perm", tuple(reversed(range(array.ndim))))
        return array.transpose(perm) if len(perm) == array.ndim else None
    numbers = ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if numbers is None:
        return None
    try:
        if node.op_type == "Reshape":
            zero_copies = not attribute(node, "allowzero", 0)
            shape = [array.shape[i] if n == 0 and zero_copies else n for i, n in enumerate(numbers)]
            return array.reshape(shape)
        return np.squeeze(array, tuple(numbers)) if node.op_type == "Squeeze" else np.expand_dims(array, tuple(numbers))
    except (ValueError, IndexError):
        return None


def does(
    chain: list[ir.Node], shape: tuple[int, ...], wanted: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> bool:
    """Whether the chain turns an array of *shape* into *wanted* of it."""
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    found = run_chain(chain, array)
    expected = wanted(array)
    return found is not None and found.shape == expected.shape and bool(np.array_equal(found, expected))
