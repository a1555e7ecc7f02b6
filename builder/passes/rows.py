"""Packed tokens as plain rows [T, n], and only the wanted rows after the last attention.

transformers thinks in batches: [1, T, n]. After attention is packed, nothing needs the batch axis. And after the
last attention every operator treats each token alone, so the rows whose logits are wanted can be taken right there.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from castline.builder.passes.layout import TOKENS, origin, run_chain
from castline.builder.passes.norms import RMS_NORM
from castline.builder.passes.walk import (
    add_constant,
    attribute,
    ints,
    is_op,
    is_weight,
    make,
    nodes,
    ours,
    present,
    producer,
    replace,
    users,
)
from castline.plugins.contract import LOGITS_INDICES, PAGED_ATTENTION

_ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Neg", "Abs", "Exp", "Tanh", "Sigmoid", "Gelu", "Erf",
    "Relu", "Swish", "Softplus", "Where", "Clip", "Max", "Min", "Cast", "Identity",
}  # fmt: skip
_LAST_AXIS_NORMS = {RMS_NORM, "LayerNormalization"}


def gather_rows(model: ir.Model) -> int:
    """The exporter's indexing by ``logits_indices`` (transposes around a GatherND) as one Gather on the token axis."""
    done = 0
    for node in nodes(model, "GatherND"):
        data, indices = node.inputs
        before, after = producer(data, "Transpose"), users(node.outputs[0])
        index_source = origin(indices)[0] if indices is not None else None
        swapped = before is not None and list(attribute(before, "perm")) == [1, 0, 2]
        back = len(after) == 1 and after[0].op_type == "Transpose" and list(attribute(after[0], "perm")) == [1, 0, 2]
        if not swapped or not back or index_source is None or index_source.name != LOGITS_INDICES:
            continue
        assert before is not None
        gather = make("Gather", [before.inputs[0], index_source], like=after[0].outputs[0], axis=1)
        model.graph.insert_before(node, gather)
        replace(after[0].outputs[0], gather.outputs[0])
        done += 1
    return done


def drop_batch_axis(model: ir.Model) -> int:
    """[1, T, n] becomes [T, n] throughout; the count is of values changed, 0 where an operator stands in the way."""
    flat: set[ir.Value] = set()
    edits: list[Callable[[], None]] = []
    for node in model.graph:
        if _starts(model, node):
            edits.append(_bypass(node))
            flat.add(node.outputs[0])
            continue
        if node.inputs and node.inputs[0] not in flat and _reshapes_rows(node, ()):
            edits.append(_bypass(node))
            continue
        touched = any(value in flat for value in node.inputs) or _unflattens(node)
        if touched and not _plan(model, node, flat, edits):
            return 0
    if any(value in flat for value in model.graph.outputs):
        return 0
    for edit in edits:
        edit()
    for value in flat:
        if value.shape is not None:
            value.shape = ir.Shape(value.shape[1:])
    return len(flat)


def _starts(model: ir.Model, node: ir.Node) -> bool:
    """An Unsqueeze that makes the batch axis: of token ids, of positions to look up, or of rows [T, n]."""
    value = node.inputs[0] if node.inputs else None
    if node.op_type != "Unsqueeze" or value is None or ints(node.inputs[1]) != [0]:
        return False
    if value is model.graph.inputs[0]:
        return True
    if value.is_graph_input():
        return all(is_op(user, "Gather") and user.inputs[1] is node.outputs[0] for user in users(node.outputs[0]))
    return value.shape is not None and len(value.shape) == 2 and str(value.shape[0]) == "T"


def _unflattens(node: ir.Node) -> bool:
    """The Reshape [T, n] → [1, T, n] behind a PagedAttention, or behind a matmul that the model wrote for rows."""
    return _reshapes_rows(node, (1,))


def _reshapes_rows(node: ir.Node, leading: tuple[int, ...]) -> bool:
    """Whether *node* is a Reshape of [T, n] to [*leading, T, n]."""
    value = node.inputs[0] if node.inputs else None
    if not is_op(node, "Reshape") or value is None or value.shape is None or len(value.shape) != 2:
        return False
    width = value.shape[-1]
    if str(value.shape[0]) != "T" or not isinstance(width, int):
        return False
    out = run_chain([node], np.zeros((TOKENS, width), np.int64))
    return out is not None and out.shape == (*leading, TOKENS, width)


def _bypass(node: ir.Node) -> Callable[[], None]:
    def edit() -> None:
        assert node.inputs[0] is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])

    return edit


def _plan(model: ir.Model, node: ir.Node, flat: set[ir.Value], edits: list[Callable[[], None]]) -> bool:
    """Notes what *node* needs when its inputs lose the batch axis; False where it cannot follow."""
    if _unflattens(node):
        edits.append(_bypass(node))
        flat.add(node.outputs[0])
        return True
    if node.op_type == "Reshape" and node.domain == "":
        return _plan_reshape(node, flat, edits)
    if node.op_type == "Gather" and node.domain == "":
        return _plan_gather(model, node, flat, edits)
    if not (_is_token_local(node) and _broadcasts(node, flat)):
        return False
    axis = attribute(node, "axis")
    if node.op_type in ("Split", "Concat") and axis > 0:
        edits.append(lambda: node.attributes.add(ir.AttrInt64("axis", axis - 1)))
    flat.update(node.outputs)
    return True


def _plan_reshape(node: ir.Node, flat: set[ir.Value], edits: list[Callable[[], None]]) -> bool:
    """A Reshape of [1, T, n] to [-1, n], or to what it is already, does nothing any more."""
    value = node.inputs[0]
    rest = list(value.shape[2:]) if value is not None and value.shape is not None and len(value.shape) > 1 else [None]
    if not all(isinstance(size, int) for size in rest):
        return False
    shape = (1, TOKENS, *rest)
    out = run_chain([node], np.zeros(shape, np.int64))
    if out is None or out.shape not in (shape, shape[1:]):
        return False
    edits.append(_bypass(node))
    if out.shape == shape:
        flat.add(node.outputs[0])
    return True


def _plan_gather(model: ir.Model, node: ir.Node, flat: set[ir.Value], edits: list[Callable[[], None]]) -> bool:
    data, indices = node.inputs
    axis = attribute(node, "axis", 0)
    if indices in flat:
        flat.add(node.outputs[0])
        return data not in flat and axis == 0
    if axis == 1:
        edits.append(lambda: node.attributes.add(ir.AttrInt64("axis", 0)))
        flat.add(node.outputs[0])
        return True
    if axis == 0 and ints(indices) == [0] and node.outputs[0].is_graph_output():
        assert data is not None
        edits.append(lambda: replace(node.outputs[0], data))
        return True
    return False


def _broadcasts(node: ir.Node, flat: set[ir.Value]) -> bool:
    """Whether every other operand still lines up: weights and constants of at most two axes."""
    others = [value for value in node.inputs if value is not None and value not in flat]
    return all(_is_operand(value) and value.shape is not None and len(value.shape) <= 2 for value in others)


def _is_operand(value: ir.Value) -> bool:
    """A weight, or a tied embedding on its way to be one."""
    transpose = producer(value, "Transpose")
    return is_weight(transpose.inputs[0] if transpose else value)


def _is_token_local(node: ir.Node) -> bool:
    """Whether *node* computes each token from that token alone, and so commutes with taking rows."""
    if node.domain != "":
        return False
    if node.op_type in _ELEMENTWISE:
        return True
    if node.op_type == "MatMul":
        return _is_operand(present(node.inputs[1]))
    if node.op_type in _LAST_AXIS_NORMS:
        return bool(attribute(node, "axis", -1) == -1)
    if node.op_type == "ReduceMean":
        return ints(node.inputs[1]) == [-1] and bool(attribute(node, "keepdims", 1))
    first = node.inputs[0] if node.inputs else None
    if node.op_type in ("Split", "Concat"):
        rank = len(first.shape) if first is not None and first.shape is not None else 0
        return attribute(node, "axis", 0) in (-1, rank - 1) and rank > 1
    return node.op_type == "Slice" and len(node.inputs) > 3 and ints(node.inputs[3]) == [-1]


def take_rows_early(model: ir.Model) -> int:
    """Moves the Gather of the wanted rows up to the last attention; the count is of nodes that now run on R rows."""
    gather = next(
        (n for n in nodes(model, "Gather") if n.inputs[1] is not None and n.inputs[1].name == LOGITS_INDICES), None
    )
    attentions = ours(model, PAGED_ATTENTION)
    if gather is None or not attentions or attribute(gather, "axis", 0) != 0:
        return 0
    order = list(model.graph)
    region = _region(order[order.index(attentions[-1]) + 1 : order.index(gather)], gather)
    entries = _entries(region)
    if not region or entries is None:
        return 0
    rows = {value: make("Gather", [value, gather.inputs[1]], axis=0) for value in entries}
    for entry, node in rows.items():
        node.outputs[0].type = entry.type
        node.outputs[0].shape = ir.Shape(["R", *entry.shape[1:]]) if entry.shape is not None else None
        model.graph.insert_before(region[0], node)
    for node in region:
        for index, value in enumerate(node.inputs):
            if value is not None and value in rows:
                node.replace_input_with(index, rows[value].outputs[0])
        for out in node.outputs:
            if out.shape is not None:
                out.shape = ir.Shape(["R", *out.shape[1:]])
    assert gather.inputs[0] is not None
    ir.convenience.replace_all_uses_with(gather.outputs[0], gather.inputs[0])
    return len(region)


def _region(candidates: list[ir.Node], gather: ir.Node) -> list[ir.Node]:
    """Nodes of *candidates* that only feed *gather*, through token-local nodes; all or none of what it depends on."""
    inside: set[ir.Node] = set()
    for node in reversed(candidates):
        fed = [user for out in node.outputs for user in users(out)]
        if fed and _is_token_local(node) and all(user in inside or user is gather for user in fed):
            inside.add(node)
    return [node for node in candidates if node in inside]


def _entries(region: list[ir.Node]) -> list[ir.Value] | None:
    """Per-token values that enter *region*; None where an operand's rows are not tokens."""
    made = {out for node in region for out in node.outputs}
    entries: dict[ir.Value, None] = {}
    for node in region:
        for value in node.inputs:
            if value is None or value in made or _is_operand(value):
                continue
            if value.shape is None or len(value.shape) != 2 or str(value.shape[0]) != "T":
                return None
            entries[value] = None
    return list(entries)


def share_tied_head(model: ir.Model) -> int:
    """``x @ Transpose(embedding)`` becomes a Gemm on the embedding itself, so that it is stored once."""
    done = 0
    for node in nodes(model, "MatMul"):
        transpose = producer(node.inputs[1], "Transpose")
        weight = transpose.inputs[0] if transpose else None
        x = node.inputs[0]
        if weight is None or not weight.is_initializer() or x is None or x.shape is None:
            continue
        if len(x.shape) == 3:
            width = int(x.shape[-1])  # type: ignore[arg-type]
            narrow = make("Reshape", [x, add_constant(model, f"shape.rows.{width}", np.array([-1, width]))])
            gemm = make("Gemm", [narrow.outputs[0], weight], transB=1)
            axes = add_constant(model, "axes.0", np.array([0]))
            wide = make("Unsqueeze", [gemm.outputs[0], axes], like=node.outputs[0])
            new = [narrow, gemm, wide]
        else:
            new = [make("Gemm", [x, weight], like=node.outputs[0], transB=1)]
        model.graph.insert_before(node, new)
        replace(node.outputs[0], new[-1].outputs[0])
        done += 1
    return done
