"""Matmuls in one form, and those of one input as one matmul: Q, K and V; gate and up.

Weights are joined lazily, when they are read. A model that comes merged (phi3) is recognised and left as it is.
"""

import numpy as np
import onnx_ir as ir

from castline.builder.passes.walk import (
    add_constant,
    add_initializer,
    attribute,
    ints,
    is_op,
    is_weight,
    make,
    nodes,
    other_input,
    present,
    producer,
    replace,
    sizes,
    users,
)
from castline.builder.passes.weights import joined


def split_gemm(model: ir.Model) -> int:
    """``x W + b`` as one Gemm (gpt2's layers) becomes MatMul and Add, which the other passes know."""
    done = 0
    for gemm in nodes(model, "Gemm"):
        bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
        scaled = any(attribute(gemm, name, 1.0) != 1.0 for name in ("alpha", "beta"))
        turned = attribute(gemm, "transA", 0) or attribute(gemm, "transB", 0)
        if scaled or turned or not is_weight(gemm.inputs[1]) or (bias is not None and not is_weight(bias)):
            continue
        new = [make("MatMul", gemm.inputs[:2], like=gemm.outputs[0])]
        if bias is not None:
            new.append(make("Add", [new[0].outputs[0], bias], like=gemm.outputs[0]))
        model.graph.insert_before(gemm, new)
        replace(gemm.outputs[0], new[-1].outputs[0])
        done += 1
    return done


def merge_qkv(model: ir.Model) -> int:
    """``Concat(x @ Wq + bq, x @ Wk + bk, x @ Wv + bv)`` becomes ``x @ W + b``; slices put together again vanish."""
    done = 0
    for concat in nodes(model, "Concat"):
        if attribute(concat, "axis") != -1 or len(concat.inputs) != 3:
            continue
        parts = [value for value in concat.inputs if value is not None]
        whole = _reassembled(parts)
        if whole is None:
            linears = [_Linear.match(value) for value in parts]
            whole = _merge(model, concat, [x for x in linears if x is not None], "qkv") if None not in linears else None
        if whole is not None:
            replace(concat.outputs[0], whole)
            done += 1
    return done


def merge_gate_up(model: ir.Model) -> int:
    """Two matmuls of one input, multiplied after the gate's activation, become one matmul and a Split."""
    done = 0
    for product in nodes(model, "Mul"):
        pair = _gate_and_up(product)
        if pair is None:
            continue
        gate, up = pair
        earlier = min((gate, up), key=lambda x: _place(model, x.last)).last
        merged = _merge(model, earlier, [gate, up], "gate_up")
        if merged is None:
            continue
        sizes = add_constant(model, f"split.{gate.width}", np.array([gate.width, gate.width]))
        split = make("Split", [merged, sizes], outputs=2, axis=-1)
        model.graph.insert_before(earlier, split)
        for linear, half in ((gate, split.outputs[0]), (up, split.outputs[1])):
            half.type, half.shape = linear.last.outputs[0].type, linear.last.outputs[0].shape
            replace(linear.last.outputs[0], half)
        done += 1
    return done


def _place(model: ir.Model, node: ir.Node) -> int:
    return next(i for i, n in enumerate(model.graph) if n is node)


class _Linear:
    """``x @ W`` or ``x @ W + b``; ``last`` computes the result."""

    def __init__(self, matmul: ir.Node, last: ir.Node, bias: ir.Value | None) -> None:
        self.last = last
        self.bias = bias
        self.x, self.weight = (present(value) for value in matmul.inputs)
        assert self.weight.const_value is not None
        self.width = sizes(self.weight.const_value)[-1]

    @classmethod
    def match(cls, value: ir.Value | None) -> "_Linear | None":
        node = value.producer() if value is not None else None
        if is_op(node, "MatMul"):
            assert node is not None
            return cls(node, node, None) if is_weight(node.inputs[1]) else None
        if not is_op(node, "Add"):
            return None
        assert node is not None
        matmul = producer(node.inputs[0], "MatMul") or producer(node.inputs[1], "MatMul")
        if matmul is None or not is_weight(matmul.inputs[1]):
            return None
        bias = other_input(node, matmul.outputs[0])
        flat = bias is not None and is_weight(bias) and bias.shape is not None and len(bias.shape) == 1
        return cls(matmul, node, bias) if flat else None


def _reassembled(parts: list[ir.Value]) -> ir.Value | None:
    """The tensor whose consecutive slices along the last axis *parts* are, all of it."""
    first = parts[0].producer()
    whole = first.inputs[0] if first is not None and first.op_type in ("Split", "Slice") else None
    if first is None or whole is None or whole.shape is None or not isinstance(whole.shape[-1], int):
        return None
    last_axis = (-1, len(whole.shape) - 1)
    if first.op_type == "Split":
        return whole if list(first.outputs) == parts and attribute(first, "axis", 0) in last_axis else None
    start = 0
    for part in parts:
        node = producer(part, "Slice")
        bounds = [ints(v) for v in node.inputs[1:]] if node and node.inputs[0] is whole else []
        if len(bounds) < 3 or bounds[0] != [start] or bounds[2] not in ([last_axis[0]], [last_axis[1]]):
            return None
        if bounds[1] is None or bounds[3:] not in ([], [[1]]):
            return None
        start = min(bounds[1][0], whole.shape[-1])
    return whole if start == whole.shape[-1] else None


def _gate_and_up(product: ir.Node) -> tuple[_Linear, _Linear] | None:
    """(gate, up) where *product* multiplies an activation of gate with up."""
    for activated, plain in (product.inputs, product.inputs[::-1]):
        up = _Linear.match(plain)
        gate = _Linear.match(_before_activation(activated))
        if up is None or gate is None or gate.last is up.last:
            continue
        if gate.x is up.x and gate.width == up.width and activated is not gate.last.outputs[0]:
            return gate, up
    return None


def _before_activation(value: ir.Value | None) -> ir.Value | None:
    """What an elementwise activation (a node, or ``x * sigmoid(x)``) was applied to."""
    node = value.producer() if value is not None else None
    if node is None or node.domain != "":
        return None
    if node.op_type == "Mul":
        sigmoid = producer(node.inputs[0], "Sigmoid") or producer(node.inputs[1], "Sigmoid")
        x = sigmoid.inputs[0] if sigmoid else None
        return x if sigmoid and other_input(node, sigmoid.outputs[0]) is x else None
    return node.inputs[0] if node.op_type in ("Gelu", "Relu", "Sigmoid", "Tanh", "Swish") else None


def _merge(model: ir.Model, before: ir.Node, linears: list[_Linear], name: str) -> ir.Value | None:
    """One matmul (and bias) for *linears* of one input, inserted at *before*; None where they differ in input."""
    if len({id(x.x) for x in linears}) != 1 or any(len(users(x.weight)) != 1 for x in linears):
        return None
    weights = [x.weight.const_value for x in linears if x.weight.const_value is not None]
    base = f"{str(linears[0].weight.name).rsplit('.', 3)[0]}.{name}"
    weight = add_initializer(model, f"{base}.weight.T", joined(weights, f"{base}.weight.T"))
    matmul = make("MatMul", [linears[0].x, weight])
    new = [matmul]
    if any(x.bias is not None for x in linears):
        zeros = [ir.tensor(np.zeros(x.width, np.float32)) for x in linears]
        biases = [x.bias.const_value if x.bias is not None else zero for x, zero in zip(linears, zeros, strict=True)]
        bias = add_initializer(model, f"{base}.bias", joined([b for b in biases if b is not None], f"{base}.bias"))
        new.append(make("Add", [matmul.outputs[0], bias]))
    like = linears[0].last.outputs[0]
    for node in new:
        node.outputs[0].type = like.type
        if like.shape is not None:
            node.outputs[0].shape = ir.Shape([*like.shape[:-1], sum(x.width for x in linears)])
    model.graph.insert_before(before, new)
    return new[-1].outputs[0]
