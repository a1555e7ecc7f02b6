"""RMSNorm as one node, with the residual add before it as one node.

transformers writes ``w * (x * rsqrt(mean(x ** 2) + eps))``, with ``1 + w`` in gemma (folded to a constant before this).
"""

import onnx_ir as ir

from castline.builder.passes.walk import (
    attribute,
    constant,
    ints,
    is_op,
    is_weight,
    make,
    nodes,
    other_input,
    producer,
    replace,
    scalar,
    used_once,
    users,
)

RMS_NORM = "SimplifiedLayerNormalization"
SKIP_RMS_NORM = "SkipSimplifiedLayerNormalization"
MS = "com.microsoft"


def fuse_rms_norm(model: ir.Model) -> int:
    """5 to 7 nodes become ``SimplifiedLayerNormalization(x, w)`` over the last axis."""
    done = 0
    for node in nodes(model, "Reciprocal"):
        found = _match(node)
        if found is None:
            continue
        x, weight, epsilon, last = found
        fused = make(RMS_NORM, [x, weight], like=last.outputs[0], axis=-1, epsilon=epsilon, stash_type=1)
        model.graph.insert_before(last, fused)
        replace(last.outputs[0], fused.outputs[0])
        done += 1
    return done


def _match(reciprocal: ir.Node) -> tuple[ir.Value, ir.Value, float, ir.Node] | None:
    """(x, weight, epsilon, last node) of the norm around a Reciprocal."""
    root = producer(reciprocal.inputs[0], "Sqrt")
    add = producer(root.inputs[0], "Add") if root else None
    if add is None:
        return None
    mean = producer(add.inputs[0], "ReduceMean") or producer(add.inputs[1], "ReduceMean")
    epsilon = scalar(other_input(add, mean.outputs[0])) if mean else None
    if mean is None or epsilon is None or ints(mean.inputs[1]) != [-1] or attribute(mean, "keepdims", 1) != 1:
        return None
    power = producer(mean.inputs[0], "Pow")
    if power is None or scalar(power.inputs[1]) != 2.0:
        return None
    x = power.inputs[0]
    scale = _single_user(reciprocal.outputs[0], "Mul")
    if x is None or scale is None or other_input(scale, reciprocal.outputs[0]) is not x:
        return None
    last = _single_user(scale.outputs[0], "Mul")
    weight = other_input(last, scale.outputs[0]) if last else None
    if last is None or weight is None or not is_weight(weight) or weight.shape is None or len(weight.shape) != 1:
        return None
    return x, weight, epsilon, last


def _single_user(value: ir.Value, op_type: str) -> ir.Node | None:
    if not used_once(value):
        return None
    user = users(value)[0]
    return user if is_op(user, op_type) else None


def fuse_skip_norm(model: ir.Model) -> int:
    """A residual add and the norm of its sum become one node, which gives the sum as well."""
    done = 0
    for norm in nodes(model, RMS_NORM):
        add = producer(norm.inputs[0], "Add")
        if add is None or constant(add.inputs[0]) is not None or constant(add.inputs[1]) is not None:
            continue
        left, right = add.inputs
        if is_weight(left) or is_weight(right) or not _same_shape(left, right):
            continue
        total = add.outputs[0]
        fused = make(
            SKIP_RMS_NORM,
            [left, right, norm.inputs[1]],
            domain=MS,
            outputs=4,
            like=norm.outputs[0],
            epsilon=float(attribute(norm, "epsilon")),
        )
        for training_only in fused.outputs[1:3]:
            training_only.name = ""
        model.graph.insert_before(add, fused)
        replace(norm.outputs[0], fused.outputs[0])
        replace(total, fused.outputs[3])
        done += 1
    if done:
        model.opset_imports.setdefault(MS, 1)
    return done


def _same_shape(left: ir.Value | None, right: ir.Value | None) -> bool:
    return (
        left is not None
        and right is not None
        and left.shape is not None
        and right.shape is not None
        and left.shape == right.shape
    )
