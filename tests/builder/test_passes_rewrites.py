"""Each pass on a small graph made by hand: what it leaves, and that the numbers stay the same."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from castline.builder.passes.activations import fuse_gelu_tanh
from castline.builder.passes.matmuls import merge_gate_up, merge_qkv, split_gemm
from castline.builder.passes.norms import fuse_rms_norm, fuse_skip_norm
from castline.builder.passes.pipeline import run_passes
from castline.builder.passes.positions import tabulate_positions
from castline.builder.passes.rows import drop_batch_axis, gather_rows, share_tied_head, take_rows_early
from castline.builder.passes.weights import fold_constants, remove_dead_code, transpose_weights
from castline.engines.device_memory import TABLE_BYTES

T, H, R = 5, 8, 2


def graph(text: str, **weights: NDArray[Any]) -> ir.Model:
    """A model from ONNX's text form; *weights* become initializers, whose names the text may use."""
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "castline" : 1]>'
    model = ir.from_onnx_text(f"{header} graph {text}")
    dangling = {v.name: v for n in model.graph for v in n.inputs if v is not None and v.name in weights}
    for name, array in weights.items():
        value = dangling.get(name, ir.Value(name=name))
        value.const_value = ir.tensor(array, name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
        model.graph.register_initializer(value)
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=False)
    return ir.from_proto(proto)


def run(model: ir.Model, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def check(
    model: ir.Model, apply: Callable[[ir.Model], int], feeds: dict[str, NDArray[Any]], matched: int
) -> Counter[str]:
    """Applies the pass; outputs must not change. The operators that are left."""
    before = run(model, feeds)
    assert apply(model) == matched
    remove_dead_code(model)
    for wanted, found in zip(before, run(model, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    return Counter(n.op_type for n in model.graph)


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(*shape: int) -> NDArray[np.float32]:
    return rng().standard_normal(shape).astype(np.float32)


RMS = """
    two = Constant <value = float {{2.0}}> ()
    eps = Constant <value = float {{0.00001}}> ()
    axes = Constant <value = int64[1] {{-1}}> ()
    sq = Pow ({x}, two)
    mean = ReduceMean <keepdims = 1> (sq, axes)
    shifted = Add (mean, eps)
    root = Sqrt (shifted)
    inverse = Reciprocal (root)
    scaled = Mul ({x}, inverse)
"""


@pytest.mark.parametrize("order", ["scaled, w", "w, scaled"])
def test_rms_norm(order: str) -> None:
    """Both orders of the weight's product occur (gemma has it second)."""
    text = f"(float[T, {H}] x) => (float[T, {H}] y) {{ {RMS.format(x='x')} y = Mul ({order}) }}"
    model = graph(text, w=normal(H))
    fold_constants(model)
    left = check(model, fuse_rms_norm, {"x": 3 * normal(T, H)}, matched=1)
    assert left == {"SimplifiedLayerNormalization": 1}


def test_rms_norm_of_one_plus_weight() -> None:
    """gemma's norm scales by 1 + w: constant folding must have made it one weight."""
    one = "one = Constant <value = float {1.0}> () shifted_w = Add (w, one)"
    text = f"(float[T, {H}] x) => (float[T, {H}] y) {{ {RMS.format(x='x')} {one} y = Mul (scaled, shifted_w) }}"
    model = graph(text, w=normal(H))
    fold_constants(model)
    assert check(model, fuse_rms_norm, {"x": normal(T, H)}, matched=1) == {"SimplifiedLayerNormalization": 1}


def test_a_norm_over_another_axis_stays() -> None:
    """Only the last axis is an RMSNorm."""
    body = RMS.format(x="x").replace("{-1}", "{0}")
    model = graph(f"(float[T, {H}] x) => (float[T, {H}] y) {{ {body} y = Mul (scaled, w) }}", w=normal(H))
    fold_constants(model)
    assert fuse_rms_norm(model) == 0


def test_skip_norm_keeps_the_sum() -> None:
    """The residual sum has other readers; the fused node must give it to them."""
    text = f"""(float[T, {H}] a, float[T, {H}] b) => (float[T, {H}] normed, float[T, {H}] other) {{
        total = Add (a, b)
        normed = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> (total, w)
        other = Sigmoid (total)
    }}"""
    model = graph(text, w=normal(H))
    for node in model.graph:
        node.outputs[0].shape = ir.Shape(["T", H])
    feeds = {"a": normal(T, H), "b": 2 * normal(T, H)[::-1].copy()}
    left = check(model, fuse_skip_norm, feeds, matched=1)
    assert left == {"SkipSimplifiedLayerNormalization": 1, "Sigmoid": 1}


def test_skip_norm_leaves_a_bias_alone() -> None:
    """Adding a constant is no residual."""
    text = f"""(float[T, {H}] a) => (float[T, {H}] y) {{
        total = Add (a, bias)
        y = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> (total, w)
    }}"""
    assert fuse_skip_norm(graph(text, w=normal(H), bias=normal(H))) == 0


def qkv_weights(biased: tuple[str, ...]) -> dict[str, NDArray[np.float32]]:
    draw = rng()
    widths = {"q": 8, "k": 4, "v": 4}
    weights = {f"w{n}": draw.standard_normal((H, w)).astype(np.float32) for n, w in widths.items()}
    return weights | {f"b{n}": draw.standard_normal(widths[n]).astype(np.float32) for n in biased}


@pytest.mark.parametrize("biased", [(), ("q", "k", "v"), ("q", "v")])
def test_qkv_merges(biased: tuple[str, ...]) -> None:
    """One matmul; a part without a bias among parts with one has a bias of zero."""
    body = "".join(
        f"m{n} = MatMul (x, w{n}) {n} = Add (m{n}, b{n})\n" if n in biased else f"{n} = MatMul (x, w{n})\n"
        for n in "qkv"
    )
    model = graph(
        f"(float[T, {H}] x) => (float[T, 16] y) {{ {body} y = Concat <axis = -1> (q, k, v) }}", **qkv_weights(biased)
    )
    left = check(model, merge_qkv, {"x": normal(T, H)}, matched=1)
    assert left == ({"MatMul": 1, "Add": 1} if biased else {"MatMul": 1})


def test_qkv_of_different_inputs_stays() -> None:
    """Cross projections share no input, and must stay apart."""
    text = f"""(float[T, {H}] x, float[T, {H}] z) => (float[T, 16] y) {{
        q = MatMul (x, wq) k = MatMul (z, wk) v = MatMul (z, wv)
        y = Concat <axis = -1> (q, k, v)
    }}"""
    assert merge_qkv(graph(text, **qkv_weights(()))) == 0


@pytest.mark.parametrize("how", ["slice", "split"])
def test_merged_qkv_is_recognised(how: str) -> None:
    """phi3 cuts one matmul into three: put together again, it is that matmul."""
    split = "sizes = Constant <value = int64[3] {8, 4, 4}> () q, k, v = Split <axis = -1> (whole, sizes)"
    ends = "".join(f"i{n} = Constant <value = int64[1] {{{n}}}> ()\n" for n in (0, 8, 12, 16))
    last = "last = Constant <value = int64[1] {-1}> ()"
    cuts = "q = Slice (whole, i0, i8, last) k = Slice (whole, i8, i12, last) v = Slice (whole, i12, i16, last)"
    body = split if how == "split" else f"{ends} {last} {cuts}"
    text = f"""(float[T, {H}] x) => (float[T, 16] y) {{
        whole = MatMul (x, w) {body}
        y = Concat <axis = -1> (q, k, v)
    }}"""
    model = graph(text, w=normal(H, 16))
    fold_constants(model)
    assert check(model, merge_qkv, {"x": normal(T, H)}, matched=1) == {"MatMul": 1}


def test_slices_out_of_order_stay() -> None:
    """K before Q is not the tensor that was cut."""
    text = f"""(float[T, {H}] x) => (float[T, 16] y) {{
        whole = MatMul (x, w)
        sizes = Constant <value = int64[3] {{8, 4, 4}}> ()
        q, k, v = Split <axis = -1> (whole, sizes)
        y = Concat <axis = -1> (k, q, v)
    }}"""
    model = graph(text, w=normal(H, 16))
    fold_constants(model)
    assert merge_qkv(model) == 0


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_up_merges(activation: str, up_first: bool) -> None:
    """The gate is the half that is activated, wherever it stands in the product."""
    act = "s = Sigmoid (g) a = Mul (g, s)" if activation == "silu" else 'a = Gelu <approximate = "tanh"> (g)'
    product = "y = Mul (u, a)" if up_first else "y = Mul (a, u)"
    text = f"""(float[T, {H}] x) => (float[T, 6] y) {{
        g = MatMul (x, wg) {act} u = MatMul (x, wu) {product}
    }}"""
    weights = rng().standard_normal((2, H, 6)).astype(np.float32)
    left = check(graph(text, wg=weights[0], wu=weights[1]), merge_gate_up, {"x": normal(T, H)}, matched=1)
    assert (left["MatMul"], left["Split"]) == (1, 1)


def test_weights_are_transposed_when_read() -> None:
    """Folding the transpose of a weight by copying it would hold every weight twice."""
    model = graph(
        f"(float[T, {H}] x) => (float[T, 6] y) {{ t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) }}",
        w=normal(6, H),
    )
    assert check(model, transpose_weights, {"x": normal(T, H)}, matched=1) == {"MatMul": 1}
    assert {type(v.const_value) for n in model.graph for v in n.inputs if v is not None and v.is_initializer()} == {
        ir.LazyTensor
    }


TIED = """(int64[T] ids) => (float[T, 20] y) {
    x = Gather (e, ids)
    t = Transpose <perm = [1, 0]> (e)
    y = MatMul (x, t)
}"""


def test_tied_head_is_stored_once() -> None:
    """Neither the transpose pass nor the head may make a second copy of the embedding."""
    model = graph(TIED, e=normal(20, H))
    assert transpose_weights(model) == 0
    left = check(model, share_tied_head, {"ids": np.arange(T)}, matched=1)
    assert left == {"Gather": 1, "Gemm": 1}
    assert list(model.graph.initializers) == ["e"]


def test_exporter_indexing_becomes_a_gather() -> None:
    """Transposes around a GatherND move the whole hidden state twice."""
    text = f"""(float[1, T, {H}] x, int64[R] logits_indices) => (float[1, R, {H}] y) {{
        t = Transpose <perm = [1, 0, 2]> (x)
        last = Constant <value = int64[1] {{-1}}> ()
        i = Unsqueeze (logits_indices, last)
        g = GatherND (t, i)
        y = Transpose <perm = [1, 0, 2]> (g)
    }}"""
    model = graph(text)
    fold_constants(model)
    feeds = {"x": normal(1, T, H), "logits_indices": np.array([4, 1])}
    assert check(model, gather_rows, feeds, matched=1) == {"Gather": 1}


BATCHED = """(int64[T] input_ids, int64[R] logits_indices) => (float[R, 20] logits) {
    zero = Constant <value = int64[1] {0}> ()
    first = Constant <value = int64 {0}> ()
    ids = Unsqueeze (input_ids, zero)
    x = Gather (e, ids)
    rows = Gather <axis = 1> (x, logits_indices)
    head = MatMul (rows, w)
    logits = Gather <axis = 0> (head, first)
}"""


def test_batch_axis_is_dropped() -> None:
    """The axes of what stays must move along."""
    model = graph(BATCHED, e=normal(20, H), w=normal(H, 20))
    fold_constants(model)
    before = run(model, {"input_ids": np.arange(T), "logits_indices": np.array([4, 0])})
    assert drop_batch_axis(model) == 4  # ids, embeddings, rows, logits
    remove_dead_code(model)
    after = run(model, {"input_ids": np.arange(T), "logits_indices": np.array([4, 0])})
    np.testing.assert_allclose(after[0], before[0], atol=1e-6)
    assert Counter(n.op_type for n in model.graph) == {"Gather": 2, "MatMul": 1}


def test_batch_axis_stays_where_an_operator_mixes_tokens() -> None:
    """A cumulative sum over tokens cannot follow: nothing may change, and nothing halfway."""
    text = BATCHED.replace(
        "head = MatMul (rows, w)", "axis = Constant <value = int64 {1}> () c = CumSum (rows, axis) head = MatMul (c, w)"
    )
    model = graph(text, e=normal(20, H), w=normal(H, 20))
    fold_constants(model)
    nodes = [(n.op_type, [v.name for v in n.inputs if v]) for n in model.graph]
    assert drop_batch_axis(model) == 0
    assert [(n.op_type, [v.name for v in n.inputs if v]) for n in model.graph] == nodes


def test_dead_code_goes_with_its_weights() -> None:
    """A weight nothing reads would still be written into the engine."""
    model = graph(f"(float[T, {H}] x) => (float[T, {H}] y) {{ y = Sigmoid (x) unused = Add (x, w) }}", w=normal(H))
    assert check(model, remove_dead_code, {"x": normal(T, H)}, matched=1) == {"Sigmoid": 1}
    assert not model.graph.initializers


def test_constants_fold() -> None:
    """What depends on no input is computed once, at build time."""
    text = f"""(float[T, {H}] x) => (float[T, {H}] y) {{
        one = Constant <value = float {{1.0}}> ()
        shifted = Add (w, one)
        y = Mul (x, shifted)
    }}"""
    model = graph(text, w=normal(H))
    assert check(model, fold_constants, {"x": normal(T, H)}, matched=2) == {"Mul": 1}


ROWS = """(int64[T] input_ids, int64[R] logits_indices) => (float[R, 20] logits)
    <float[T, 8] flat, float[T, 8] again, float[T, 8] y> {
    zero = Constant <value = int64[1] {0}> ()
    same = Constant <value = int64[2] {1, -1}> ()
    rows_of_h = Constant <value = int64[2] {-1, 8}> ()
    batched = Constant <value = int64[3] {1, -1, 8}> ()
    first = Constant <value = int64 {0}> ()
    ids = Unsqueeze (input_ids, zero)
    viewed = Reshape (ids, same)
    x = Gather (e, viewed)
    flat = Reshape (x, rows_of_h)
    again = Reshape (flat, rows_of_h)
    y = MatMul (again, w1)
    wide = Reshape (y, batched)
    total = Add (wide, x)
    kept = Reshape (total, batched)
    rows = Gather <axis = 1> (kept, logits_indices)
    head = MatMul (rows, w)
    logits = Gather <axis = 0> (head, first)
}"""


def test_rows_that_the_model_flattens_itself_stay_flat() -> None:
    """gpt2 reshapes around each matmul: a dispatch for each, and Linear could not see the residual."""
    model = graph(ROWS, e=normal(20, H), w=normal(H, 20), w1=normal(H, H))
    fold_constants(model)
    feeds = {"input_ids": np.arange(T), "logits_indices": np.array([4, 0])}
    left = check(model, drop_batch_axis, feeds, matched=8)
    assert left == {"Gather": 2, "MatMul": 2, "Add": 1}
    [add] = [n for n in model.graph if n.op_type == "Add"]
    assert [len(v.shape or ()) for v in (*add.inputs, *add.outputs) if v is not None] == [2, 2, 2]


def test_gemm_with_a_bias_is_matmul_and_add() -> None:
    """gpt2 writes its layers so; the other passes know one form of a linear layer."""
    text = f"(float[T, {H}] x) => (float[T, 6] y) {{ y = Gemm (x, w, b) }}"
    left = check(graph(text, w=normal(H, 6), b=normal(6)), split_gemm, {"x": normal(T, H)}, matched=1)
    assert left == {"MatMul": 1, "Add": 1}


@pytest.mark.parametrize("how", ["alpha = 2.0", "transB = 1", "transA = 1"])
def test_other_gemms_stay(how: str) -> None:
    """A scale or a transpose dropped on the way would give wrong numbers."""
    text = f"(float[{H}, {H}] x) => (float[{H}, {H}] y) {{ y = Gemm <{how}> (x, w, b) }}"
    assert split_gemm(graph(text, w=normal(H, H), b=normal(H))) == 0


GELU = """
    half = Constant <value = float {0.5}> ()
    three = Constant <value = float {3.0}> ()
    c = Constant <value = float {0.044715}> ()
    root = Constant <value = float {0.7978845608}> ()
    one = Constant <value = float {1.0}> ()
    halved = Mul (x, half)
    cube = Pow (x, three)
    scaled = Mul (cube, c)
    inner = Add (x, scaled)
    angle = Mul (inner, root)
    tanh = Tanh (angle)
    shifted = Add (tanh, one)
    y = Mul (halved, shifted)
"""


def test_gelu_by_tanh() -> None:
    """Eight nodes of gpt2 that Linear has in its epilogue."""
    model = graph(f"(float[T, {H}] x) => (float[T, {H}] y) {{ {GELU} }}")
    fold_constants(model)
    assert check(model, fuse_gelu_tanh, {"x": 3 * normal(T, H)}, matched=1) == {"Gelu": 1}


@pytest.mark.parametrize(
    ("constant", "other"), [("{0.5}", "{0.25}"), ("{3.0}", "{2.0}"), ("{0.044715}", "{0.05}"), ("{1.0}", "{2.0}")]
)
def test_what_is_no_gelu_stays(constant: str, other: str) -> None:
    """One constant off is another function."""
    model = graph(f"(float[T, {H}] x) => (float[T, {H}] y) {{ {GELU.replace(constant, other)} }}")
    fold_constants(model)
    assert fuse_gelu_tanh(model) == 0


ROPE = """(float[T, 4] x, int64[T] positions) => (float[T, 4] y, float[T, 4] z) {
    last = Constant <value = int64[1] {1}> ()
    column = Unsqueeze (positions, last)
    p = Cast <to = 1> (column)
    angles = Mul (p, w)
    cos = Cos (angles)
    sin = Sin (angles)
    y = Mul (x, cos)
    z = Mul (x, sin)
}"""


def test_functions_of_positions_become_tables() -> None:
    """Cosines and sines of RoPE: seven nodes a step for what two lookups give, to the bit."""
    model = graph(ROPE, w=normal(4))
    fold_constants(model)
    feeds = {"x": normal(T, 4), "positions": np.array([63, 0, 7, 7, 31])}
    before = run(model, feeds)
    assert tabulate_positions(model, 64) == 2
    remove_dead_code(model)
    assert Counter(n.op_type for n in model.graph) == {"Gather": 2, "Mul": 2}
    for wanted, found in zip(before, run(model, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_large_tables_stay_computed() -> None:
    """A model of a million positions must not get a table of them in its weights."""
    model = graph(ROPE, w=normal(4))
    fold_constants(model)
    assert tabulate_positions(model, TABLE_BYTES // 16 + 1) == 0


def test_what_depends_on_the_whole_step_is_no_table() -> None:
    """A frequency chosen by the longest position of the step is not a function of one position."""
    text = ROPE.replace("angles = Mul (p, w)", "most = ReduceMax (p) q = Div (p, most) angles = Mul (q, w)")
    model = graph(text, w=normal(4))
    fold_constants(model)
    assert tabulate_positions(model, 64) == 0


def test_rows_wait_for_attention() -> None:
    """Without an attention node there is no place to take rows early, and the graph stays as it is."""
    model = graph(BATCHED, e=normal(20, H), w=normal(H, 20))
    assert take_rows_early(model) == 0


def test_reports_count_nodes() -> None:
    """The build log's before and after must chain from one pass to the next."""
    reports = run_passes(graph(TIED, e=normal(20, H)), 64)
    assert all(a.after == b.before for a, b in pairwise(reports))
    assert reports[-1].after == 2
