"""The matmuls of a fused graph that have constant weights: those of the layers, and the output head."""

import onnx_ir as ir

from castline.builder.passes.walk import attribute, is_op, is_weight, ours, sizes
from castline.plugins.contract import PAGED_ATTENTION


def head_matmul(model: ir.Model) -> ir.Node | None:
    """The matmul that the logits come from, with nothing but elementwise operators after it."""
    value: ir.Value | None = model.graph.outputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in ("MatMul", "Gemm"):
            return node
        value = node.inputs[0]
    return None


def layer_matmuls(model: ir.Model) -> list[ir.Node]:
    """All but the head, with a weight [K, N] (MatMul) or [N, K] (Gemm with transB), in order."""
    head = head_matmul(model)
    return [node for node in model.graph if node is not head and _has_weight(node)]


def e4m3_matmuls(model: ir.Model) -> list[ir.Node]:
    """Those of the layers' matmuls that multiply e4m3 in an fp8 engine: all but those behind the last attention node.

    What those round goes straight into the logits: on the demo model they are a sixth of all that fp8 costs, at a
    thirty-sixth of the weights.
    """
    nodes = list(model.graph)
    attention = ours(model, PAGED_ATTENTION)
    behind = set(nodes[nodes.index(attention[-1]) :]) if attention else set()
    return [node for node in layer_matmuls(model) if node not in behind]


def is_turned(node: ir.Node) -> bool:
    """Whether the weight is [N, K]."""
    return is_op(node, "Gemm") and attribute(node, "transB", 0) == 1


def _has_weight(node: ir.Node) -> bool:
    if not (is_op(node, "MatMul") or is_op(node, "Gemm")) or not is_weight(node.inputs[1]):
        return False
    assert node.inputs[1] is not None
    tensor = node.inputs[1].const_value
    return tensor is not None and len(sizes(tensor)) == 2
