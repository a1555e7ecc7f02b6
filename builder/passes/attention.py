"""Attention over one packed QKV tensor, with QK-norm and RoPE moved inside the node.

``castline::Attention(q, k, v)`` becomes ``castline::PagedAttention(qkv, cos, sin, q_norm_weight, k_norm_weight)``. The cos and sin
half-tables are computed once a step and shared by all layers. Where the graph around a node is not what the pass
knows, QK-norm or RoPE stays outside, as standard operators: correct, only slower.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from castline.builder.attention import RopeStyle
from castline.builder.passes.layout import TOKENS, does, origin
from castline.builder.passes.norms import RMS_NORM
from castline.builder.passes.walk import (
    add_constant,
    attribute,
    make,
    nodes,
    ours,
    producer,
    replace,
    scalar,
)
from castline.plugins.contract import DOMAIN, PAGED_ATTENTION, QkNorm


@dataclass(frozen=True, slots=True)
class _Norm:
    kind: QkNorm
    weight: ir.Value
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Source:
    """Where Q or K comes from, once RoPE and the norm are taken off: *base* is [1, T, heads * D]."""

    base: ir.Value
    norm: _Norm | None
    rope: ir.Node | None


def pack_attention(model: ir.Model) -> int:
    """Every Attention becomes a PagedAttention over packed QKV; the count is of those with RoPE inside."""
    inside = 0
    tables = _Tables(model)
    for node in ours(model, "Attention"):
        heads, kv_heads = attribute(node, "num_heads"), attribute(node, "num_kv_heads")
        q_in, k_in, v_in = node.inputs
        assert q_in is not None and k_in is not None and v_in is not None
        head_dim = int(q_in.shape[1]) // heads  # type: ignore[index, arg-type]
        q, k = _take_off(q_in, heads, head_dim), _take_off(k_in, kv_heads, head_dim)
        if not _same_rope(q, k) or not _same_norm(q, k):
            q, k = None, None
        v = _flat_origin(v_in, kv_heads * head_dim)
        parts = [
            q.base if q else _batched(node, q_in),
            k.base if k else _batched(node, k_in),
            v or _batched(node, v_in),
        ]
        packed = make("Concat", parts, axis=-1)
        shape = add_constant(model, f"shape.rows.{(heads + 2 * kv_heads) * head_dim}", np.array([-1, (heads + 2 * kv_heads) * head_dim]))
        rows = make("Reshape", [packed.outputs[0], shape])
        cos, sin, rotary_dim, interleaved = tables.of(q.rope if q else None, node)
        norm = q.norm if q else None
        fused = make(
            PAGED_ATTENTION,
            [rows.outputs[0], cos, sin, norm.weight if norm else None, k.norm.weight if k and k.norm else None],
            domain=DOMAIN,
            like=node.outputs[0],
            layer=attribute(node, "layer"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=attribute(node, "scale"),
            window=attribute(node, "window"),
            softcap=attribute(node, "softcap"),
            rotary_dim=rotary_dim,
            rope_interleaved=int(interleaved),
            qk_norm=int(norm.kind if norm else QkNorm.NONE),
            norm_eps=norm.epsilon if norm else 1e-6,
        )
        _type(packed.outputs[0], [1, "T", (heads + 2 * kv_heads) * head_dim])
        _type(rows.outputs[0], ["T", (heads + 2 * kv_heads) * head_dim])
        model.graph.insert_before(node, [packed, rows, fused])
        replace(node.outputs[0], fused.outputs[0])
        inside += rotary_dim > 0
    return inside


def _type(value: ir.Value, shape: list[int | str]) -> None:
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)


def _batched(before: ir.Node, value: ir.Value) -> ir.Value:
    """[T, n] → [1, T, n], as the other parts are."""
    graph = before.graph
    assert graph is not None and isinstance(graph, ir.Graph)
    axes = ir.node("Constant", [], attributes={"value_ints": [0]})
    node = make("Unsqueeze", [value, axes.outputs[0]])
    graph.insert_before(before, [axes, node])
    return node.outputs[0]


def _take_off(value: ir.Value, heads: int, head_dim: int) -> _Source | None:
    """Takes layout moves, RoPE and the norm off *value* [T, heads * D]; None where they are not in that order."""
    start, chain = origin(value)
    rope = producer(start, "Rope", DOMAIN)
    per_head = (1, heads, TOKENS, head_dim)
    if rope is None:
        return _without_rope(value, heads, head_dim)
    if not does(chain, per_head, lambda a: a.transpose(0, 2, 1, 3).reshape(TOKENS, -1)):
        return None
    turned = rope.inputs[0]
    assert turned is not None
    start, chain = origin(turned)
    norm = producer(start, RMS_NORM)
    if norm is None:
        good = does(chain, (1, TOKENS, heads * head_dim), lambda a: _heads_first(a, heads))
        return _Source(start, None, rope) if good and _width(start) == heads * head_dim else None
    return _with_norm(norm, chain, rope, heads, head_dim)


def _with_norm(norm: ir.Node, chain: list[ir.Node], rope: ir.Node, heads: int, head_dim: int) -> _Source | None:
    """The norm lies between two chains of moves: over each head, or over all of them before they are split."""
    inside, weight = norm.inputs[0], norm.inputs[1]
    assert inside is not None and weight is not None
    start, before = origin(inside)
    width = int(weight.shape[0])  # type: ignore[index, arg-type]
    whole = (1, TOKENS, heads * head_dim)
    if _width(start) != heads * head_dim or not does([*before, *chain], whole, lambda a: _heads_first(a, heads)):
        return None
    epsilon = float(attribute(norm, "epsilon"))
    if width == head_dim and _width(inside) == head_dim:
        return _Source(start, _Norm(QkNorm.PER_HEAD, weight, epsilon), rope)
    if width == heads * head_dim and not before:
        return _Source(start, _Norm(QkNorm.FULL, weight, epsilon), rope)
    return None


def _without_rope(value: ir.Value, heads: int, head_dim: int) -> _Source | None:
    base = _flat_origin(value, heads * head_dim)
    return _Source(base, None, None) if base is not None else None


def _flat_origin(value: ir.Value, width: int) -> ir.Value | None:
    """The [1, T, width] that *value* [T, width] is a mere reshape of."""
    start, chain = origin(value)
    same = does(chain, (1, TOKENS, width), lambda a: a.reshape(TOKENS, width))
    return start if same and _width(start) == width and _rank(start) == 3 else None


def _heads_first(array: np.ndarray, heads: int) -> np.ndarray:  # type: ignore[type-arg]
    return array.reshape(1, TOKENS, heads, -1).transpose(0, 2, 1, 3)


def _width(value: ir.Value) -> int | None:
    last = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return last if isinstance(last, int) else None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _same_rope(q: _Source | None, k: _Source | None) -> bool:
    if q is None or k is None:
        return False
    if q.rope is None or k.rope is None:
        return q.rope is k.rope
    names = ("style", "rotary_dim")
    return list(q.rope.inputs[1:]) == list(k.rope.inputs[1:]) and all(
        attribute(q.rope, n) == attribute(k.rope, n) for n in names
    )


def _same_norm(q: _Source | None, k: _Source | None) -> bool:
    if q is None or k is None:
        return False
    if q.norm is None or k.norm is None:
        return q.norm is k.norm
    return (q.norm.kind, q.norm.epsilon) == (k.norm.kind, k.norm.epsilon)


class _Tables:
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
            _type(node.outputs[0], ["T", width])
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
        if node.op_type not in ("Cos", "Sin", "Cast") and not (node.op_type == "Mul" and scalar(node.inputs[1]) is not None):
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
    x = rope.inputs[0]
    assert x is not None and x.shape is not None
    head_dim = int(x.shape[3])  # type: ignore[arg-type]
    new: list[ir.Node] = []

    def emit(op_type: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
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


