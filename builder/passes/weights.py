"""Constant operands: matmul weights by reference, constant folding, and what nothing uses any more.

torch stores a linear layer's weight as [N, K], ONNX's MatMul wants [K, N]. Folding the transpose would copy every
weight; here it becomes a lazy tensor that transposes when it is read, one tensor at a time.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes import common

from castline.builder.passes.walk import add_initializer, attribute, is_weight, nodes, replace, sizes

FOLD_LIMIT = 1 << 16
"""Elements; small enough for shapes, scales and norm weights, and for no matmul weight that matters."""


def transposed(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    """[N, K] → [K, N]."""
    rows, columns = sizes(tensor)
    return ir.LazyTensor(lambda: ir.tensor(tensor.numpy().T), tensor.dtype, ir.Shape([columns, rows]), name=name)


def joined(tensors: Sequence[ir.TensorProtocol], name: str) -> ir.LazyTensor:
    """Side by side along the last axis."""
    shape = [*sizes(tensors[0])[:-1], sum(sizes(t)[-1] for t in tensors)]
    return ir.LazyTensor(
        lambda: ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=-1)),
        tensors[0].dtype,
        ir.Shape(shape),
        name=name,
    )


def transpose_weights(model: ir.Model) -> int:
    """``Transpose(weight)`` becomes a weight, unless the graph also reads it as it is (a tied embedding)."""
    done = 0
    for node in nodes(model, "Transpose"):
        weight = node.inputs[0]
        if weight is None or not is_weight(weight) or list(attribute(node, "perm", ())) != [1, 0]:
            continue
        if any(user.op_type != "Transpose" for user, _ in weight.uses()):
            continue
        assert weight.const_value is not None
        name = str(weight.name)
        replace(node.outputs[0], add_initializer(model, f"{name}.T", transposed(weight.const_value, f"{name}.T")))
        model.graph.remove(node, safe=True)
        done += 1
    return done


def fold_constants(model: ir.Model) -> int:
    """Computes at build time what depends on no input; the count is of nodes folded away."""
    before = len(model.graph)
    onnxscript.optimizer.optimize_ir(
        model, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT, should_fold=_may_fold
    )
    return before - len(model.graph)


def _may_fold(node: ir.Node) -> bool | None:
    return False if node.op_type == "Transpose" else None


def remove_dead_code(model: ir.Model) -> int:
    """Drops nodes, weights and constants that no output depends on; the count is of nodes."""
    before = len(model.graph)
    common.RemoveUnusedNodesPass()(model)
    return before - len(model.graph)
