"""GELU written out in elementary operators, as one node."""

import math

import onnx_ir as ir

from castline.builder.passes.walk import make, nodes, other_input, producer, replace, scalar, used_once, users


def fuse_gelu_tanh(model: ir.Model) -> int:
    """``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (gelu_new of gpt2) becomes ``Gelu(x)`` by tanh."""
    done = 0
    for tanh in nodes(model, "Tanh"):
        found = _match(tanh)
        if found is None:
            continue
        x, last = found
        gelu = make("Gelu", [x], like=last.outputs[0], approximate="tanh")
        model.graph.insert_before(last, gelu)
        replace(last.outputs[0], gelu.outputs[0])
        done += 1
    return done


def _match(tanh: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """(x, last node) of the GELU around a Tanh."""
    inner = _times(tanh.inputs[0], math.sqrt(2 / math.pi))
    total = producer(inner, "Add")
    if total is None:
        return None
    for x, cubic in (total.inputs, total.inputs[::-1]):
        power = producer(_times(cubic, 0.044715), "Pow")
        if x is None or power is None or power.inputs[0] is not x or scalar(power.inputs[1]) != 3.0:
            continue
        shifted = _only_user(tanh.outputs[0], "Add")
        if shifted is None or scalar(other_input(shifted, tanh.outputs[0])) != 1.0:
            continue
        last = _only_user(shifted.outputs[0], "Mul")
        if last is not None and _times(other_input(last, shifted.outputs[0]), 0.5) is x:
            return x, last
    return None


def _times(value: ir.Value | None, factor: float) -> ir.Value | None:
    """What *value* is *factor* times of."""
    product = producer(value, "Mul")
    for x, constant in (product.inputs, product.inputs[::-1]) if product is not None else ():
        found = scalar(constant)
        if found is not None and math.isclose(found, factor, rel_tol=1e-6):
            return x
    return None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    user = users(value)[0] if used_once(value) else None
    return user if user is not None and user.op_type == op_type and user.domain == "" else None
