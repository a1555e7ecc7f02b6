"""What castline::Linear takes in around a matmul, what it leaves, and that the numbers stay the same."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from castline.builder.linear_sites import NO_SURROUNDINGS, Surroundings, surroundings
from castline.builder.lower import GRAPH_NAME, add_maxima, save_graph
from castline.builder.quantize import matmul_shapes, quantize
from castline.builder.recipes import (
    FALLBACK,
    FP32,
    LINEAR_W4DM,
    LINEAR_W8,
    LINEAR_W8_G32,
    RECIPE_CHOICES,
    RECIPES,
    MatmulKernel,
    recipe,
)
from castline.engines.errors import BuildError
from castline.plugins.cpu.session import SessionOptions, native_options
from castline.plugins.linear import MAX_K, MAXIMA_BLOCK, Activation
from castline.plugins.linear_packing import pack, padded_k, unpack

T, K, N = 6, 96, 40


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


WEIGHTS: dict[str, NDArray[Any]] = {
    "w": normal(K, N) / 8,
    "w2": normal(N, K, seed=2) / 4,
    "norm": 1 + normal(K, seed=3) / 5,
    "bias": normal(N, seed=4),
    "halves": np.array([N // 2, N // 2]),
    "thirds": np.array([10, 30]),
    "e": normal(48, K, seed=5) / 4,
    "long": 1 + normal(MAX_K + 32, 4, seed=9) / 8,
    "places": normal(8, K, seed=6) / 4,
}


def graph(text: str) -> ir.Model:
    """A model from ONNX's text form that may use the names of WEIGHTS."""
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "castline" : 1]>'
    model = ir.from_onnx_text(f"{header} graph {text}")
    dangling = {v.name: v for n in model.graph for v in n.inputs if v is not None and v.name in WEIGHTS}
    for name, value in dangling.items():
        value.const_value = ir.tensor(WEIGHTS[str(name)], name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(WEIGHTS[str(name)].shape)
        model.graph.register_initializer(value)
    for node in model.graph:  # an operator whose shapes onnx does not infer
        if node.op_type == "SimplifiedLayerNormalization" and node.inputs[0] is not None:
            node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=False))


def run(model: ir.Model, feeds: dict[str, NDArray[Any]], directory: Path) -> list[NDArray[Any]]:
    path = save_graph(model, directory)
    options = native_options(SessionOptions(num_threads=1))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def check(text: str, feeds: dict[str, NDArray[Any]], directory: Path, kernel: MatmulKernel = LINEAR_W8_G32) -> ir.Model:
    """The model with *kernel* everywhere; its outputs must be those of the fp32 graph but for rounding to 8 bits."""
    model = graph(text)
    before = run(model, feeds, directory)
    quantize(model, dict.fromkeys(matmul_shapes(model), kernel))
    for wanted, found in zip(before, run(model, feeds, directory), strict=True):
        assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
    return model


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


RMS = "h = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> (x, norm)"
SILU = "s = Sigmoid (g) a = Mul (g, s)"
X = {"x": normal(T, K, seed=7)}
R = {"r": normal(T, N, seed=8)}


def test_norm_bias_activation_and_residual_are_folded(tmp_path: Path) -> None:
    """One node for six, with every operand in its place."""
    text = f"""(float[T, {K}] x, float[T, {N}] r) => (float[T, {N}] y) {{
        {RMS} m = MatMul (h, w) g = Add (m, bias) {SILU} y = Add (r, a)
    }}"""
    model = check(text, X | R, tmp_path)
    assert operators(model) == {"Linear": 1}
    [node] = model.graph
    assert node.attributes["norm_eps"].as_float() == pytest.approx(1e-5)
    assert surroundings(graph(text)) == {(K, N): Surroundings(True, True, Activation.SILU, False, True)}


@pytest.mark.parametrize("split", ["Split <axis = -1> (m, halves)", "Split <axis = 1, num_outputs = 2> (m)"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        (SILU, Activation.SILU),
        ("a = Gelu (g)", Activation.GELU),
        ('a = Gelu <approximate = "tanh"> (g)', Activation.GELU_TANH),
        ("a = Relu (g)", Activation.RELU),
    ],
)
def test_gated_activations_are_folded(
    activation: str, kind: Activation, gate_first: bool, split: str, tmp_path: Path
) -> None:
    """The gate is the half that is activated, whichever half of the matmul it is."""
    halves = "g, u" if gate_first else "u, g"
    text = f"""(float[T, {K}] x) => (float[T, {N // 2}] y) {{
        m = MatMul (x, w) {halves} = {split} {activation} y = Mul (u, a)
    }}"""
    assert operators(check(text, X, tmp_path)) == {"Linear": 1}
    assert surroundings(graph(text)) == {(K, N): Surroundings(activation=kind, gated=True)}


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_bias_goes_with_its_half(gate_first: bool, tmp_path: Path) -> None:
    """The merged bias is one vector; Linear wants the gate's, then the up-projection's."""
    halves = "g, u" if gate_first else "u, g"
    text = f"""(float[T, {K}] x) => (float[T, {N // 2}] y) {{
        p = MatMul (x, w) m = Add (bias, p) {halves} = Split <axis = -1> (m, halves) {SILU} y = Mul (a, u)
    }}"""
    model = check(text, X, tmp_path)
    assert operators(model) == {"Linear": 1}


NOT_FOLDED = {
    "norm with another reader": (f"{RMS} y = MatMul (h, w) z = Sigmoid (h)", K, {"SimplifiedLayerNormalization": 1}),
    "residual with another reader": ("m = MatMul (x, w) y = Add (m, r) z = Sigmoid (m)", N, {"Add": 1}),
    "activation with another reader": ("m = MatMul (x, w) y = Relu (m) z = Add (m, r)", N, {"Relu": 1, "Add": 1}),
    "silu whose sigmoid is read": ("g = MatMul (x, w) s = Sigmoid (g) y = Mul (g, s) z = Add (s, r)", N, {"Mul": 1}),
    "square of itself": ("m = MatMul (x, w) y = Mul (m, m) z = Sigmoid (r)", N, {"Mul": 1}),
    "sum with itself": ("m = MatMul (x, w) y = Add (m, m) z = Sigmoid (r)", N, {"Add": 1}),
}


@pytest.mark.parametrize("case", NOT_FOLDED)
def test_what_others_read_is_left(case: str, tmp_path: Path) -> None:
    """A value that is folded away is not there for its other readers."""
    body, width, left = NOT_FOLDED[case]
    text = f"""(float[T, {K}] x, float[T, {N}] r) => (float[T, {N}] y, float[T, {width}] z) {{ {body} }}"""
    found = operators(check(text, X | R, tmp_path))
    assert found["Linear"] == 1
    assert found >= Counter(left)


def test_unequal_halves_are_left(tmp_path: Path) -> None:
    """10 and 30 columns are no gate and up-projection, whatever multiplies them later."""
    text = f"""(float[T, {K}] x) => (float[T, 10] a, float[T, 30] u) {{
        m = MatMul (x, w) g, u = Split <axis = -1> (m, thirds) a = Relu (g)
    }}"""
    assert operators(check(text, X, tmp_path)) == {"Linear": 1, "Split": 1, "Relu": 1}


def test_a_norm_of_several_matmuls_goes_into_each(tmp_path: Path) -> None:
    """Parallel attention and MLP read one norm: it is cheaper computed twice than dispatched and written once."""
    text = f"""(float[T, {K}] x) => (float[T, {N}] y, float[T, {N}] z) {{
        {RMS} y = MatMul (h, w) m = MatMul (h, w) z = Relu (m)
    }}"""
    assert operators(check(text, X, tmp_path)) == {"Linear": 2}


def test_two_matmuls_summed_are_one_anothers_residual(tmp_path: Path) -> None:
    """A parallel block adds attention and MLP: one of them is the other's residual, never both."""
    text = f"""(float[T, {K}] x) => (float[T, {K}] y) {{
        m = MatMul (x, w) u = MatMul (m, w2) b = Relu (m) v = MatMul (b, w2) s = Add (u, v) y = Add (s, x)
    }}"""
    assert operators(check(text, X, tmp_path)) == {"Linear": 3, "Relu": 1, "Add": 1}


def test_rows_under_a_batch_axis(tmp_path: Path) -> None:
    """Where a model keeps its batch axis, Linear still computes rows, and the shapes around it stay."""
    text = f"""(float[1, T, {K}] x, float[1, T, {N}] r) => (float[1, T, {N}] y) {{
        {RMS} m = MatMul (h, w) y = Add (m, r)
    }}"""
    feeds = {"x": X["x"][None], "r": R["r"][None]}
    assert operators(check(text, feeds, tmp_path)) == {"Reshape": 2, "Linear": 1, "Unsqueeze": 1}


def test_an_input_of_unknown_rows_falls_back(tmp_path: Path) -> None:
    """A true batch has no rows that Linear could take: MatMulNBits takes any shape."""
    text = f"(float[2, T, {K}] x) => (float[2, T, {N}] y) {{ y = MatMul (x, w) }}"
    model = check(text, {"x": normal(2, T, K)}, tmp_path, LINEAR_W4DM)
    assert operators(model) == {"MatMulNBits": 1}
    [node] = model.graph
    assert node.attributes["bits"].as_int() == FALLBACK.bits


def test_a_matmul_too_long_for_linear_runs(tmp_path: Path) -> None:
    """Every recipe has a kernel that takes any K, and what it makes can be loaded."""
    k = MAX_K + 32
    text = f"(float[T, {k}] x) => (float[T, 4] y) {{ y = MatMul (x, long) }}"
    for name in ("int8", "q4_1", "int4"):
        kernel = next(kernel for kernel in RECIPES[name].layer_kernels if kernel.takes(k))
        model = graph(text)
        quantize(model, {(k, 4): kernel})
        found = run(model, {"x": np.ones((1, k), np.float32)}, tmp_path)[0]
        np.testing.assert_allclose(found, WEIGHTS["long"].sum(0)[None], rtol=0.02)


TIED = """(int64[T] ids) => (float[T, 48] logits) {
    x = Gather (e, ids)
    m = MatMul (x, w) a = Relu (m) back = MatMul (a, w2)
    raw = Gemm <transB = 1> (back, e)
    logits = Tanh (raw)
}"""
IDS = {"ids": np.array([3, 0, 47, 3])}


@pytest.mark.parametrize("kernel", [LINEAR_W8, LINEAR_W8_G32, LINEAR_W4DM], ids=lambda kernel: kernel.name)
def test_a_tied_embedding_reads_the_heads_bytes(kernel: MatmulKernel, tmp_path: Path) -> None:
    """Stored twice, the embedding would be a third of a small engine; read wrongly, every answer would be wrong."""
    model = graph(TIED)
    quantize(model, {shape: kernel if head else FP32 for shape, head in matmul_shapes(model).items()})
    found = run(model, IDS, tmp_path)[0]
    assert operators(model) == {"Embedding": 1, "MatMul": 2, "Relu": 1, "Linear": 1, "Tanh": 1}
    [embedding] = [node for node in model.graph if node.op_type == "Embedding"]
    [head] = [node for node in model.graph if node.op_type == "Linear"]
    assert embedding.inputs[1] is head.inputs[1]
    assert embedding.inputs[2] is head.inputs[2]
    assert "e" not in ir.load(tmp_path / GRAPH_NAME).graph.initializers
    assert kernel.format is not None
    e = unpack(pack(WEIGHTS["e"], kernel.format, kernel.block), 48, K, kernel.format, kernel.block)
    hidden = np.maximum(e[IDS["ids"]] @ WEIGHTS["w"], 0) @ WEIGHTS["w2"]
    assert np.abs(found - np.tanh(hidden @ e.T)).max() < 0.05


UNTIED = f"""(int64[T] input_ids, int64[T] positions) => (float[T, {N}] logits) {{{{
    token = Gather (e, {{ids}}) place = Gather (places, positions) x = Add (token, place) logits = MatMul (x, w)
}}}}"""
UNTIED_FEEDS = {"input_ids": IDS["ids"], "positions": np.array([0, 1, 2, 3])}


def packed_table(text: str, embedding: MatmulKernel = LINEAR_W8_G32) -> ir.Model:
    model = graph(text)
    quantize(model, dict.fromkeys(matmul_shapes(model), LINEAR_W8_G32), embedding)
    return model


def test_an_embedding_of_its_own_is_packed(tmp_path: Path) -> None:
    """In fp32 the table of an untied model is four times its share of the file. Positions are few, and stay exact."""
    text = UNTIED.format(ids="input_ids")
    before = run(graph(text), UNTIED_FEEDS, tmp_path)[0]
    model = packed_table(text)
    found = run(model, UNTIED_FEEDS, tmp_path)[0]
    assert operators(model) == {"Embedding": 1, "Gather": 1, "Add": 1, "Linear": 1}
    assert np.abs(found - before).max() < 0.03 * np.abs(before).max()
    stored = {name: value.const_value for name, value in ir.load(tmp_path / GRAPH_NAME).graph.initializers.items()}
    assert {name for name in stored if name.startswith("e")} == {"e.w8-g32", "e.w8-g32.scales"}
    assert stored["e.w8-g32"].nbytes == 48 * padded_k(K)
    assert stored["places"].nbytes == WEIGHTS["places"].nbytes


def test_an_embedding_under_a_batch_axis(tmp_path: Path) -> None:
    """Some models keep their batch axis, and look [1, T] ids up."""
    text = f"""(int64[T] input_ids) => (float[1, T, {N}] logits) {{
        first = Constant <value = int64[1] {{0}}> () ids = Unsqueeze (input_ids, first)
        x = Gather (e, ids) logits = MatMul (x, w)
    }}"""
    feeds = {"input_ids": IDS["ids"]}
    before = run(graph(text), feeds, tmp_path)[0]
    model = packed_table(text)
    found = run(model, feeds, tmp_path)[0]
    assert operators(model)["Embedding"] == 1
    assert np.abs(found - before).max() < 0.03 * np.abs(before).max()


OTHER_READS = {
    "of positions": UNTIED.format(ids="positions"),
    "along the other axis": "(int64[T] input_ids) => (float[48, T] x) { x = Gather <axis = 1> (e, input_ids) }",
    "of a table that is read whole": f"""(int64[T] input_ids) => (float[T, {K}] x, float[48, {K}] y) {{
        x = Gather (e, input_ids) y = Tanh (e)
    }}""",
    "of ids computed from others": f"""(int64[T] input_ids) => (float[T, {K}] x) {{
        other = Abs (input_ids) x = Gather (e, other)
    }}""",
}


@pytest.mark.parametrize("case", OTHER_READS)
def test_other_lookups_stay(case: str) -> None:
    """Only rows of token ids are what an Embedding gives."""
    found = operators(packed_table(OTHER_READS[case]))
    assert found["Embedding"] == 0
    assert found["Gather"] > 0


def test_fp32_leaves_the_embedding_alone() -> None:
    """The fp32 recipe loses nothing."""
    assert operators(packed_table(UNTIED.format(ids="input_ids"), RECIPES["fp32"].embedding_kernel))["Embedding"] == 0
    assert {name for name, entry in RECIPES.items() if not entry.embedding_kernel.is_linear} == {"fp32"}


@pytest.mark.parametrize("last", ["logits = MatMul (x, w)", "y = MatMul (x, w) logits = Tanh (y)"])
def test_the_head_gives_the_maxima_of_its_logits(last: str) -> None:
    """Those of a matmul whose outputs are changed before they are logits would choose other tokens."""
    model = graph(f"(float[T, {K}] x) => (float[T, {N}] logits) {{ {last} }}")
    quantize(model, dict.fromkeys(matmul_shapes(model), LINEAR_W4DM))
    for _ in range(2):  # the last of several calls holds
        add_maxima(model)
    outputs = [(value.name, tuple(value.shape)) for value in model.graph.outputs]
    expected = [("logits_maxima", ("R", -(-N // MAXIMA_BLOCK)))] if "Tanh" not in last else []
    assert outputs[1:] == expected


def test_a_tied_embedding_under_a_batch_axis(tmp_path: Path) -> None:
    """Ids [1, T] give embeddings [1, T, K], from an operator that knows ids [T]."""
    text = f"""(int64[1, T] ids) => (float[1, T, {K}] x, float[R, 48] y) {{
        x = Gather (e, ids) some = Constant <value = int64[2] {{-1, {K}}}> () rows = Reshape (x, some)
        y = Gemm <transB = 1> (rows, e)
    }}"""
    model = check(text, {"ids": IDS["ids"][None]}, tmp_path)
    assert operators(model)["Embedding"] == 1


def test_weights_lie_in_whole_pages(tmp_path: Path) -> None:
    """Weights are mapped: a tensor that begins inside a page would drag its neighbour in, and miss cache lines."""
    model = graph(TIED)
    quantize(model, dict.fromkeys(matmul_shapes(model), LINEAR_W8_G32))
    save_graph(model, tmp_path)
    external = [
        value.const_value
        for value in ir.load(tmp_path / GRAPH_NAME).graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    assert {tensor.dtype for tensor in external} >= {ir.DataType.UINT8}
    assert all((tensor.offset or 0) % 4096 == 0 for tensor in external)


def test_the_choice_of_wide_kernels_reaches_the_node() -> None:
    """The tuner's choice would otherwise be a line of the report and nothing else."""
    model = graph(TIED)
    quantize(model, dict.fromkeys(matmul_shapes(model), replace(LINEAR_W8_G32, wide_rows=16)))
    assert {n.attributes["wide_rows"].as_int() for n in model.graph if n.op_type == "Linear"} == {16}


def test_kernels_mix(tmp_path: Path) -> None:
    """Each shape has its own kernel: a norm goes into a Linear node only where all its readers are Linear."""
    text = f"""(float[T, {K}] x) => (float[T, {N}] y, float[T, {K}] z) {{
        {RMS} y = MatMul (h, w) m = MatMul (y, w2) z = Add (m, h)
    }}"""
    model = graph(text)
    before = run(model, X, tmp_path)
    quantize(model, {(K, N): LINEAR_W8_G32, (N, K): FALLBACK})
    assert operators(model) == {"SimplifiedLayerNormalization": 1, "Linear": 1, "MatMulNBits": 1, "Add": 1}
    for wanted, found in zip(before, run(model, X, tmp_path), strict=True):
        assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_shape_without_a_kernel_is_named() -> None:
    """A choice that is lost on the way must not leave a matmul in fp32 unseen."""
    with pytest.raises(BuildError, match="no kernel was chosen for the matmul 96 x 40"):
        quantize(graph(TIED), {})


def test_fp32_leaves_the_matmuls_alone() -> None:
    """The fp32 recipe is the reference of all others."""
    model = graph(TIED)
    before = operators(model)
    assert sum(report.matched for report in quantize(model, dict.fromkeys(matmul_shapes(model), FP32))) == 0
    assert operators(model) == before


def test_nothing_around_is_no_surroundings() -> None:
    """A bare matmul must be timed bare."""
    assert surroundings(graph(f"(float[T, {K}] x) => (float[T, {N}] y) {{ y = MatMul (x, w) }}")) == {
        (K, N): NO_SURROUNDINGS
    }


def test_recipes_name_their_kernels() -> None:
    """The names are in manifests and in the tuner's cache: two kernels of one name would be one timing."""
    for name, entry in RECIPES.items():
        assert recipe(name) is entry
        kernels = [*entry.layer_kernels, *entry.head_kernels]
        assert len({k.name for k in kernels}) == len(set(kernels))
    with pytest.raises(BuildError, match="choose one of auto, fp32, int8, q4_1, int4"):
        recipe("int3")
    assert RECIPE_CHOICES == ("auto", "fp32", "int8", "q4_1", "int4")
