"""RoPE: half-width cos and sin tables that attention nodes share; RoPE that stays outside, as standard operators."""

from typing import Any

import numpy as np
import onnx_ir as ir

from castline.builder.attention import RopeStyle
from castline.builder.passes.walk import add_constant, attribute, make, ours, present, replace, scalar, typed


class HalfTables:
    """Half-width cos and sin [T, r], made once for each pair of tables that RoPE nodes use."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.halves: dict[tuple[ir.Value, int], ir.Value] = {}
        self.narrow: dict[ir.Value, ir.Value | None] = {}

    def of(self, rope: ir.Node | None, before: ir.Node) -> tuple[ir.Value | None, ir.Value | None, int, bool]:
        """(cos, sin, rotary_dim, interleaved) for a PagedAttention inserted at *before*."""
        if rope is None:
            return None, None, 0, False
        style = RopeStyle(attribute(rope, "style"))
        rotary_dim = attribute(rope, "rotary_dim")
        cos, sin = (self._half(value, style, rotary_dim // 2, before) for value in rope.inputs[1:])
        return cos, sin, rotary_dim, style.interleaved

    def _half(self, table: ir.Value | None, style: RopeStyle, width: int, before: ir.Node) -> ir.Value:
        assert table is not None
        key = (table, int(style))
        if key not in self.halves:
            narrow = table if style.narrow else self._narrowed(table, before)
            if narrow is None:
                narrow = self._sliced(table, style, width, before)
            shape = add_constant(self.model, f"shape.rows.{width}", np.array([-1, width]))
            node = make("Reshape", [narrow, shape])
            typed(node.outputs[0], ["T", width])
            self.model.graph.insert_before(before, node)
            self.halves[key] = node.outputs[0]
        return self.halves[key]

    def _sliced(self, table: ir.Value, style: RopeStyle, width: int, before: ir.Node) -> ir.Value:
        step = 2 if style == RopeStyle.INTERLEAVED else 1
        stop = width * step
        numbers = [add_constant(self.model, f"slice.{n}", np.array([n])) for n in (0, stop, -1, step)]
        node = make("Slice", [table, *numbers])
        self.model.graph.insert_before(before, node)
        return node.outputs[0]

    def _narrowed(self, value: ir.Value, before: ir.Node) -> ir.Value | None:
        """*value* computed from ``f`` where it was computed from ``Concat(f, f)``: half the cosines."""
        if value not in self.narrow:
            self.narrow[value] = self._recompute(value, before)
        return self.narrow[value]

    def _recompute(self, value: ir.Value, before: ir.Node) -> ir.Value | None:
        node = value.producer()
        if node is None or node.domain != "":
            return None
        if node.op_type == "Concat":
            twice = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return node.inputs[0] if twice and attribute(node, "axis") in (-1, 2) else None
        if node.op_type not in ("Cos", "Sin", "Cast") and not (
            node.op_type == "Mul" and scalar(node.inputs[1]) is not None
        ):
            return None
        first = node.inputs[0]
        half = self._narrowed(first, before) if first is not None else None
        if half is None:
            return None
        copy = ir.node(node.op_type, [half, *node.inputs[1:]], attributes=dict(node.attributes))
        self.model.graph.insert_before(before, copy)
        return copy.outputs[0]


def expand_rope(model: ir.Model) -> int:
    """RoPE that could not move inside becomes standard operators."""
    left = ours(model, "Rope")
    for node in left:
        _expand(model, node)
    return len(left)


def _expand(model: ir.Model, rope: ir.Node) -> None:
    style, rotary_dim = RopeStyle(attribute(rope, "style")), attribute(rope, "rotary_dim")
    x = present(rope.inputs[0])
    assert x.shape is not None
    head_dim = int(x.shape[3])  # type: ignore[arg-type]
    new: list[ir.Node] = []

    def emit(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        new.append(make(op_type, inputs, **attributes))
        return new[-1].outputs[0]

    def number(n: int) -> ir.Value:
        return add_constant(model, f"slice.{n}", np.array([n]))

    def cut(value: ir.Value | None, start: int, stop: int, step: int = 1) -> ir.Value:
        return emit("Slice", value, number(start), number(stop), number(-1), number(step))

    def table(value: ir.Value | None) -> ir.Value:
        if not style.narrow:
            wide = style == RopeStyle.INTERLEAVED
            value = cut(value, 0, rotary_dim, 2) if wide else cut(value, 0, rotary_dim // 2)
        return emit("Unsqueeze", value, number(1))

    cos, sin = table(rope.inputs[1]), table(rope.inputs[2])
    half = rotary_dim // 2
    if style.interleaved:
        a, b = cut(x, 0, rotary_dim, 2), cut(x, 1, rotary_dim, 2)
    else:
        a, b = cut(x, 0, half), cut(x, half, rotary_dim)
    first = emit("Sub", emit("Mul", a, cos), emit("Mul", b, sin))
    second = emit("Add", emit("Mul", b, cos), emit("Mul", a, sin))
    if style.interleaved:
        pairs = emit("Concat", emit("Unsqueeze", first, number(-1)), emit("Unsqueeze", second, number(-1)), axis=-1)
        shape = add_constant(model, f"shape.heads.{rotary_dim}", np.array([0, 0, 0, rotary_dim]))
        turned = emit("Reshape", pairs, shape)
    else:
        turned = emit("Concat", first, second, axis=-1)
    if rotary_dim < head_dim:
        turned = emit("Concat", turned, cut(x, rotary_dim, head_dim), axis=-1)
    model.graph.insert_before(rope, new)
    replace(rope.outputs[0], turned)
    model.graph.remove(rope, safe=True)
