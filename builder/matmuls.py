"""The matmuls with constant weights: what the tuner chooses kernels for, and quantising replaces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.passes.walk import attribute, is_op, is_weight, present, sizes

Shape = tuple[int, int]
"""(K, N)."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """``x @ W``: a MatMul whose weight is stored [K, N], or a Gemm whose weight is stored [N, K]."""

    node: ir.Node

    @property
    def x(self) -> ir.Value:
        return present(self.node.inputs[0])

    @property
    def y(self) -> ir.Value:
        return self.node.outputs[0]

    @property
    def weight(self) -> ir.Value:
        return present(self.node.inputs[1])

    @property
    def shape(self) -> Shape:
        rows, columns = sizes(self._tensor)
        return (columns, rows) if self._by_rows else (rows, columns)

    @property
    def name(self) -> str:
        """Of the weight in the checkpoint, as far as passes left it."""
        return str(self.weight.name).removesuffix(".T")

    def reader(self) -> Callable[[], NDArray[Any]]:
        """Reads W [N, K]; works when the node is gone as well."""
        tensor = self._tensor
        return tensor.numpy if self._by_rows else lambda: tensor.numpy().T

    @property
    def _by_rows(self) -> bool:
        return self.node.op_type == "Gemm"

    @property
    def _tensor(self) -> ir.TensorProtocol:
        tensor = self.weight.const_value
        assert tensor is not None
        return tensor


def find_matmuls(model: ir.Model) -> list[Matmul]:
    """In graph order."""
    return [
        Matmul(node)
        for node in model.graph
        if (is_op(node, "MatMul") or (is_op(node, "Gemm") and attribute(node, "transB") == 1 and len(node.inputs) == 2))
        and is_weight(node.inputs[1])
        and len(present(node.inputs[1]).shape or ()) == 2
    ]


def find_head(model: ir.Model) -> ir.Node | None:
    """The matmul that the logits come from, with nothing but elementwise operators after it."""
    value: ir.Value | None = model.graph.outputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in ("MatMul", "Gemm"):
            return node
        value = node.inputs[0]
    return None
