"""Reading and rewriting an ONNX graph: the few verbs that all passes share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.plugins.contract import DOMAIN


def is_op(node: ir.Node | None, op_type: str, domain: str = "") -> bool:
    return node is not None and node.op_type == op_type and node.domain == domain


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that computes *value*, when it is that operator."""
    node = value.producer() if value is not None else None
    return node if is_op(node, op_type, domain) else None


def nodes(model: ir.Model, op_type: str, domain: str = "") -> list[ir.Node]:
    """Nodes of that operator in order; a list, so that the graph may change meanwhile."""
    return [n for n in model.graph if n.op_type == op_type and n.domain == domain]


def ours(model: ir.Model, op_type: str) -> list[ir.Node]:
    return nodes(model, op_type, DOMAIN)


def is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None


def constant(value: ir.Value | None, limit: int = 4096) -> NDArray[Any] | None:
    """What *value* always is, when it is a small constant."""
    tensor = value.const_value if value is not None and value.producer() is None else None
    return None if tensor is None or tensor.size > limit else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    found = constant(value, limit=1)
    return None if found is None else float(found.reshape(()))


def ints(value: ir.Value | None) -> list[int] | None:
    found = constant(value)
    return None if found is None else [int(i) for i in found.reshape(-1)]


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The input of a two-input node that is not *value*; None where both are, or neither."""
    left, right = node.inputs
    if (left is value) == (right is value):
        return None
    return right if left is value else left


def users(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]


def used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def make(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    *,
    domain: str = "",
    outputs: int = 1,
    like: ir.Value | None = None,
    **attributes: Any,
) -> ir.Node:
    """A node; its first output has the type and shape of *like*."""
    node = ir.node(op_type, inputs, attributes=attributes, domain=domain, num_outputs=outputs)
    if like is not None:
        node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node


def sizes(tensor: ir.TensorProtocol) -> list[int]:
    """Shape of a tensor, which is always known."""
    return [int(size) for size in tensor.shape.numpy()]


def present(value: ir.Value | None) -> ir.Value:
    """An operand that its operator requires."""
    assert value is not None
    return value


def typed(value: ir.Value, shape: list[int | str]) -> ir.Value:
    """*value* as float32 of *shape*."""
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return value


def add_initializer(model: ir.Model, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A new constant of the graph under a name of its own."""
    taken = model.graph.initializers
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}.{number}"
    value = ir.Value(name=unique, shape=ir.Shape(sizes(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def add_constant(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    """The small constant *array*; equal ones under one name are shared."""
    found = model.graph.initializers.get(name)
    if found is not None and found.const_value is not None and np.array_equal(found.const_value.numpy(), array):
        return found
    return add_initializer(model, name, ir.tensor(array, name=name))


def remove_unused(model: ir.Model, node: ir.Node) -> None:
    """Removes *node*, should nothing read it, and what then nothing reads before it."""
    if node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
        return
    before = dict.fromkeys(value.producer() for value in node.inputs if value is not None)
    model.graph.remove(node, safe=True)
    for earlier in before:
        if earlier is not None:
            remove_unused(model, earlier)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Every use of *old*, as output of the graph too, becomes *new*."""
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    if old.is_graph_output():
        new.name, old.name = old.name, f"{old.name}.replaced"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
