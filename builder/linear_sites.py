"""What castline::Linear can take in around a matmul: the RMSNorm before it; bias, activation and residual after it.

A fused graph is read, never changed. A value that others read as well stays a value: what computes it is folded only
where the matmul is its one reader (or, for the norm, matmuls that become Linear nodes themselves).
"""

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from castline.builder.matmuls import Matmul, Shape, find_matmuls
from castline.builder.passes.norms import RMS_NORM
from castline.builder.passes.walk import (
    attribute,
    constant,
    ints,
    is_op,
    is_weight,
    other_input,
    present,
    producer,
    used_once,
    users,
)
from castline.plugins.linear import Activation


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a Linear node computes besides its matmul."""

    norm: bool = False
    bias: bool = False
    activation: Activation = Activation.NONE
    gated: bool = False
    residual: bool = False


NO_SURROUNDINGS = Surroundings()


@dataclass(frozen=True, slots=True)
class Site:
    """One matmul with its surroundings. ``x`` enters the norm where there is one; ``out`` is what the node replaces."""

    matmul: Matmul
    x: ir.Value
    out: ir.Value
    norm: ir.Node | None = None
    bias: ir.Value | None = None
    activation: Activation = Activation.NONE
    gated: bool = False
    gate_first: bool = True
    """Gated: whether the gate is the first half of the matmul's columns."""
    residual: ir.Value | None = None

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(
            self.norm is not None, self.bias is not None, self.activation, self.gated, self.residual is not None
        )

    @property
    def n(self) -> int:
        """Columns of the node's output."""
        return self.matmul.shape[1] // 2 if self.gated else self.matmul.shape[1]

    @property
    def last(self) -> ir.Node:
        """The last of the nodes that the Linear node replaces."""
        node = self.out.producer()
        assert node is not None
        return node


def surroundings(model: ir.Model) -> dict[Shape, Surroundings]:
    """What surrounds the matmuls of each shape, should all become Linear: the first of a shape speaks for all."""
    matmuls = find_matmuls(model)
    nodes = {matmul.node for matmul in matmuls}
    found: dict[Shape, Surroundings] = {}
    for matmul in matmuls:
        found.setdefault(matmul.shape, find_site(matmul, nodes).surroundings)
    return found


def takes_rows(matmul: Matmul) -> bool:
    """Whether x is [T, K] or [1, T, K]."""
    shape = matmul.x.shape
    return shape is not None and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))


def find_site(matmul: Matmul, linears: Collection[ir.Node]) -> Site:
    """*matmul* with all that can be folded, where the matmuls of *linears* become Linear nodes."""
    norm = _norm(matmul.x, linears)
    x = present(norm.inputs[0]) if norm else matmul.x
    out, bias = _bias(matmul.y, matmul.shape[1])
    gate_first, activation = True, Activation.NONE
    gated, plain = _gated(out, matmul.shape[1]), _activation(out)
    if gated is not None:
        activation, gate_first, out = gated
    elif plain is not None:
        activation, out = plain
    out, residual = _residual(out)
    return Site(matmul, x, out, norm, bias, activation, gated is not None, gate_first, residual)


def _norm(x: ir.Value, linears: Collection[ir.Node]) -> ir.Node | None:
    norm = producer(x, RMS_NORM)
    if norm is None or x.is_graph_output() or any(user not in linears for user in users(x)):
        return None
    return norm if is_weight(norm.inputs[1]) and attribute(norm, "axis", -1) == -1 else None


def _only_user(value: ir.Value) -> ir.Node | None:
    return users(value)[0] if used_once(value) else None


def _bias(y: ir.Value, width: int) -> tuple[ir.Value, ir.Value | None]:
    """(what follows, bias [width]) of an Add behind the matmul."""
    add = _only_user(y)
    bias = other_input(add, y) if is_op(add, "Add") and add is not None else None
    if add is None or bias is None or not is_weight(bias) or list(bias.shape or ()) != [width]:
        return y, None
    return add.outputs[0], bias


def _activation(value: ir.Value) -> tuple[Activation, ir.Value] | None:
    """The activation that is all that reads *value*, and its result."""
    if value.is_graph_output():
        return None
    found = users(value)
    if len(found) == 1:
        kind = _unary(found[0])
        return (kind, found[0].outputs[0]) if kind is not None else None
    sigmoids = [node for node in found if is_op(node, "Sigmoid") and used_once(node.outputs[0])]
    if len(found) != 2 or len(sigmoids) != 1:
        return None
    product = users(sigmoids[0].outputs[0])[0]
    if product not in found or not is_op(product, "Mul"):
        return None
    return Activation.SILU, product.outputs[0]


def _unary(node: ir.Node) -> Activation | None:
    if is_op(node, "Relu"):
        return Activation.RELU
    if is_op(node, "Gelu"):
        return Activation.GELU_TANH if attribute(node, "approximate", "none") == "tanh" else Activation.GELU
    return None


def _gated(y: ir.Value, width: int) -> tuple[Activation, bool, ir.Value] | None:
    """(activation, gate first, product) where *y* is split into halves, and one, activated, multiplies the other."""
    split = _only_user(y)
    if split is None or not is_op(split, "Split") or not _in_halves(split, y, width):
        return None
    halves = split.outputs
    for gate, up in ((0, 1), (1, 0)):
        activated = _activation(halves[gate])
        product = _only_user(halves[up])
        if activated is None or product is None or not is_op(product, "Mul"):
            continue
        if used_once(activated[1]) and other_input(product, halves[up]) is activated[1]:
            return activated[0], gate == 0, product.outputs[0]
    return None


def _in_halves(split: ir.Node, y: ir.Value, width: int) -> bool:
    rank = len(y.shape) if y.shape is not None else 0
    if len(split.outputs) != 2 or attribute(split, "axis", 0) not in (-1, rank - 1):
        return False
    given = ints(split.inputs[1]) if len(split.inputs) > 1 else None
    return given == [width // 2] * 2 if len(split.inputs) > 1 else width % 2 == 0


def _residual(y: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """(sum, the other summand) of an Add of two tensors of one shape behind *y*."""
    add = _only_user(y)
    other = other_input(add, y) if is_op(add, "Add") and add is not None else None
    if add is None or other is None or is_weight(other) or constant(other) is not None:
        return y, None
    same = y.shape is not None and other.shape is not None and y.shape == other.shape
    return (add.outputs[0], other) if same else (y, None)
