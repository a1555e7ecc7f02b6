"""Attention over one packed QKV tensor, with QK-norm and RoPE moved inside the node.

``castline::Attention(q, k, v)`` becomes ``castline::PagedAttention(qkv, cos, sin, q_norm_weight, k_norm_weight)``. The
cos and sin half-tables are computed once a step and shared by all layers. Where the graph around a node is not what the
pass knows, QK-norm or RoPE stays outside, as standard operators: correct, only slower.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from castline.builder.passes.layout import TOKENS, does, origin
from castline.builder.passes.norms import RMS_NORM
from castline.builder.passes.rope import HalfTables
from castline.builder.passes.walk import (
    add_constant,
    attribute,
    make,
    ours,
    present,
    producer,
    replace,
    typed,
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
    tables = HalfTables(model)
    for node in ours(model, "Attention"):
        heads, kv_heads = attribute(node, "num_heads"), attribute(node, "num_kv_heads")
        q_in, k_in, v_in = (present(value) for value in node.inputs)
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
        shape = add_constant(
            model, f"shape.rows.{(heads + 2 * kv_heads) * head_dim}", np.array([-1, (heads + 2 * kv_heads) * head_dim])
        )
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
        typed(packed.outputs[0], [1, "T", (heads + 2 * kv_heads) * head_dim])
        typed(rows.outputs[0], ["T", (heads + 2 * kv_heads) * head_dim])
        model.graph.insert_before(node, [packed, rows, fused])
        replace(node.outputs[0], fused.outputs[0])
        inside += rotary_dim > 0
    return inside


def _batched(before: ir.Node, value: ir.Value) -> ir.Value:
    """[T, n] → [1, T, n], as the other parts are."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
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
    start, chain = origin(present(rope.inputs[0]))
    norm = producer(start, RMS_NORM)
    if norm is None:
        good = does(chain, (1, TOKENS, heads * head_dim), lambda a: _heads_first(a, heads))
        return _Source(start, None, rope) if good and _width(start) == heads * head_dim else None
    return _with_norm(norm, chain, rope, heads, head_dim)


def _with_norm(norm: ir.Node, chain: list[ir.Node], rope: ir.Node, heads: int, head_dim: int) -> _Source | None:
    """The norm lies between two chains of moves: over each head, or over all of them before they are split."""
    inside, weight = present(norm.inputs[0]), present(norm.inputs[1])
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


def _heads_first(array: np.ndarray, heads: int) -> np.ndarray:
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
