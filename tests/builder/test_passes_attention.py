"""Packing attention: QK-norm and RoPE inside the node give what they gave outside, in every style."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from castline.builder.attention import RopeStyle
from castline.builder.lower import lower_cpu
from castline.builder.passes.attention import pack_attention
from castline.builder.passes.rope import expand_rope
from castline.builder.passes.weights import fold_constants, remove_dead_code
from castline.plugins.cpu.library import library_path

T, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 7, 24, 4, 2, 16, 16
STYLES = list(RopeStyle)


class Attention(OpRun):
    """The exporter's node, by the torch operator: no code of the native kernel."""

    op_domain = "castline"

    def _run(self, q: Any, k: Any, v: Any, **a: Any) -> tuple[Any]:
        names = ("layer", "num_heads", "num_kv_heads", "scale", "window", "softcap")
        tensors = (torch.tensor(x) for x in (q, k, v))
        return (torch.ops.castline.attention(*tensors, *(a[name] for name in names)).numpy(),)


class Rope(OpRun):
    op_domain = "castline"

    def _run(self, x: Any, cos: Any, sin: Any, style: int = 0, rotary_dim: int = 0) -> tuple[Any]:
        return (torch.ops.castline.rope(*(torch.tensor(t) for t in (x, cos, sin)), style, rotary_dim).numpy(),)


class SimplifiedLayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x: Any, w: Any, axis: int = -1, epsilon: float = 1e-6, stash_type: int = 1) -> tuple[Any]:
        return (x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * w,)


def head(name: str, heads: int, norm: str, rope: str) -> str:
    """``name`` [T, heads * D] from the input x, the way modelling code writes it."""
    width = heads * HEAD_DIM
    rms = f"SimplifiedLayerNormalization <axis = -1, epsilon = 0.001, stash_type = 1> ({{}}, {name}_norm)"
    return f"""
        {name}_linear = MatMul (x, w{name})
        {name}_full = {rms.format(f"{name}_linear") if norm == "full" else f"Identity ({name}_linear)"}
        {name}_split_shape = Constant <value = int64[4] {{1, -1, {heads}, {HEAD_DIM}}}> ()
        {name}_split = Reshape ({name}_full, {name}_split_shape)
        {name}_normed = {rms.format(f"{name}_split") if norm == "per head" else f"Identity ({name}_split)"}
        {name}_heads = Transpose <perm = [0, 2, 1, 3]> ({name}_normed)
        {name}_turned = {rope.format(f"{name}_heads")}
        {name}_back = Transpose <perm = [0, 2, 1, 3]> ({name}_turned)
        {name}_flat_shape = Constant <value = int64[2] {{-1, {width}}}> ()
        {name} = Reshape ({name}_back, {name}_flat_shape)
    """


def attention_model(style: RopeStyle, rotary_dim: int, q_norm: str = "none", k_norm: str = "none") -> ir.Model:
    rope = f"castline.Rope <style = {int(style)}, rotary_dim = {rotary_dim}> ({{}}, cos, sin)"
    doubled = (RopeStyle.HALF, RopeStyle.INTERLEAVED_TILED)
    twice = dict.fromkeys(doubled, "wide = Concat <axis = -1> (angle, angle)")
    pairs = "last = Constant <value = int64[1] {-1}> () a1 = Unsqueeze (angle, last) a2 = Concat <axis = -1> (a1, a1)"
    interleaved = f"{pairs} s = Constant <value = int64[3] {{1, -1, {rotary_dim}}}> () wide = Reshape (a2, s)"
    widen = twice.get(style, interleaved if style == RopeStyle.INTERLEAVED else "wide = Identity (angle)")
    attention = (
        f"castline.Attention <layer = 0, num_heads = {HEADS}, num_kv_heads = {KV_HEADS}, scale = 0.3, window = 3, "
        "softcap = 4.0> (q, k, v)"
    )
    text = f"""<ir_version: 10, opset_import: ["" : 21, "castline" : 1]>
    graph (float[1, T, {HIDDEN}] x, float[1, T, {rotary_dim // 2}] angle, int64[R] logits_indices)
        => (float[T, {HEADS * HEAD_DIM}] y) {{
        {widen} cos = Cos (wide) sin = Sin (wide)
        {head("q", HEADS, q_norm, rope)}
        {head("k", KV_HEADS, k_norm, rope)}
        v_linear = MatMul (x, wv)
        v_shape = Constant <value = int64[2] {{-1, {KV_HEADS * HEAD_DIM}}}> ()
        v = Reshape (v_linear, v_shape)
        attended = {attention}
        y = Identity (attended)
    }}"""
    model = ir.from_onnx_text(text)
    draw = np.random.default_rng(2)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    for node in list(model.graph):
        for value in node.inputs:
            if value is None or value.producer() is not None or value.is_graph_input() or value.const_value is not None:
                continue
            name = str(value.name)
            kind = q_norm if name.startswith("q") else k_norm
            full = heads[name[-1] if name.startswith("w") else name[0]] * HEAD_DIM
            shape = (HIDDEN, full) if name.startswith("w") else (full if kind == "full" else HEAD_DIM,)
            value.const_value = ir.tensor(draw.standard_normal(shape).astype(np.float32), name=name)
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
            model.graph.register_initializer(value)
    shaped = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=False)
    model = ir.from_proto(shaped)
    declare_shapes(model)
    fold_constants(model)
    return model


def declare_shapes(model: ir.Model) -> None:
    """What the exporter knows and shape inference does not: behind our operators and ONNX Runtime's norm."""
    shapes: dict[str, list[int | str]] = {"attended": ["T", HEADS * HEAD_DIM]}
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        flat, split = [1, "T", heads * HEAD_DIM], [1, "T", heads, HEAD_DIM]
        shapes |= {f"{name}_full": flat, f"{name}_split": split, f"{name}_normed": split, f"{name}_back": split}
        shapes |= {f"{name}_heads": [1, heads, "T", HEAD_DIM], f"{name}_turned": [1, heads, "T", HEAD_DIM]}
        shapes[name] = ["T", heads * HEAD_DIM]
    for node in model.graph:
        for out in node.outputs:
            if out.name in shapes:
                out.type, out.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shapes[out.name])


def feeds(rotary_dim: int) -> dict[str, NDArray[Any]]:
    draw = np.random.default_rng(1)
    return {
        "x": draw.standard_normal((1, T, HIDDEN)).astype(np.float32),
        "angle": draw.standard_normal((1, T, rotary_dim // 2)).astype(np.float32),
        "logits_indices": np.arange(1),
    }


def before(model: ir.Model, values: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=[Attention, Rope, SimplifiedLayerNormalization])
    return np.asarray(evaluator.run(None, values)[0])


def after(model: ir.Model, values: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    lower_cpu(model, kv_dtype="fp32", block_size=BLOCK)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    graph = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    pool = next(i for i in session.get_inputs() if i.name == "kv_pool.0")
    step = {
        "slot_mapping": np.arange(T, dtype=np.int32),
        "cu_query_lens": np.array([0, T], np.int32),
        "kv_lens": np.array([T], np.int32),
        "block_table": np.zeros((1, 1), np.int32),
        "kv_pool.0": np.zeros((1, pool.shape[1]), np.uint8),
    }
    return np.asarray(session.run(None, values | step)[0])


@pytest.mark.parametrize("norm", ["none", "per head", "full"])
@pytest.mark.parametrize("style", STYLES)
def test_inside_equals_outside(style: RopeStyle, norm: str) -> None:
    """A half-table cut at the wrong columns, or a norm over the wrong axis, changes every key."""
    model = attention_model(style, HEAD_DIM, norm, norm)
    values = feeds(HEAD_DIM)
    wanted = before(model, values)
    assert pack_attention(model) == 1
    remove_dead_code(model)
    assert expand_rope(model) == 0
    counts = Counter(n.op_type for n in model.graph)
    assert counts["PagedAttention"] == 1
    assert counts["Rope"] == counts["Transpose"] == counts["SimplifiedLayerNormalization"] == 0
    np.testing.assert_allclose(after(model, values), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
@pytest.mark.parametrize("style", STYLES)
def test_rope_as_standard_operators(style: RopeStyle, rotary_dim: int) -> None:
    """The way out where RoPE cannot move inside, partial rotation included. Q and K norms that differ force it here."""
    model = attention_model(style, rotary_dim, "per head", "none")
    values = feeds(rotary_dim)
    wanted = before(model, values)
    assert pack_attention(model) == 0
    assert expand_rope(model) == 2
    remove_dead_code(model)
    np.testing.assert_allclose(after(model, values), wanted, rtol=0, atol=2e-5)


def test_partial_rotation_inside() -> None:
    """The elements past rotary_dim pass unturned."""
    model = attention_model(RopeStyle.HALF, HEAD_DIM // 2)
    values = feeds(HEAD_DIM // 2)
    wanted = before(model, values)
    assert pack_attention(model) == 1
    remove_dead_code(model)
    np.testing.assert_allclose(after(model, values), wanted, rtol=0, atol=2e-5)


def test_cosines_are_taken_of_half_the_angles() -> None:
    """cos(concat(f, f)) computes every cosine twice, at every step."""
    model = attention_model(RopeStyle.HALF, HEAD_DIM)
    pack_attention(model)
    remove_dead_code(model)
    cos = next(n for n in model.graph if n.op_type == "Cos")
    assert cos.inputs[0] is not None
    assert cos.inputs[0].name == "angle"
