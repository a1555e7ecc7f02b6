"""MatMulNBits: packing, ONNX Runtime's reading of it, and the embedding that shares the head's bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from castline.builder.lower import GRAPH_NAME, SAME_BYTES_AS, WEIGHTS_NAME, save_graph
from castline.builder.nbits import Packed, pack
from castline.builder.quantize import matmul_shapes, quantize
from castline.builder.recipes import FP32, MatmulKernel

VOCAB, K, N = 40, 96, 24


def weight(n: int, k: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def unpack(packed: Packed, bits: int, k: int) -> NDArray[np.float32]:
    """W [N, K] as the packed form means it; written apart from `pack`."""
    values, zeros = packed.values, packed.zero_points
    if bits == 4:
        values, zeros = (np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1) for x in (values, zeros))
    groups = packed.scales.shape[1]
    values = values.reshape(values.shape[0], groups, -1).astype(np.float32)
    w = (values - zeros[:, :groups, None]) * packed.scales[..., None]
    return np.asarray(w.reshape(len(w), -1)[:, :k], np.float32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_error_is_half_a_step(bits: int, block: int, symmetric: bool) -> None:
    """A scale off by one level, a clipped end or a nibble swapped shows as an error past half a step."""
    w = weight(N, K)
    packed = pack(w, bits, block, symmetric=symmetric)
    steps = np.repeat(np.abs(packed.scales), block, axis=1)[:, :K]
    # 4 bits symmetric have one positive level less: the end opposite the largest magnitude may lose up to a step.
    slack = 1.0 if bits == 4 and symmetric else 0.5
    assert np.all(np.abs(unpack(packed, bits, K) - w) <= slack * steps + 1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_groups_stay_zero(bits: int) -> None:
    """A scale of zero would make every value of the group a NaN."""
    packed = pack(np.zeros((2, 64), np.float32), bits, 32, symmetric=True)
    assert np.all(unpack(packed, bits, 64) == 0)
    assert np.all(packed.scales == 1)


def tied_model() -> ir.Model:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    graph (int64[T] ids) => (float[T, {VOCAB}] logits) {{
        x = Gather (e, ids)
        h = MatMul (x, w)
        b = Sigmoid (h)
        back = MatMul (b, w2)
        raw = Gemm <transB = 1> (back, e)
        logits = Tanh (raw)
    }}"""
    model = ir.from_onnx_text(text)
    arrays = {"e": weight(VOCAB, K, 1), "w": weight(K, N, 2), "w2": weight(N, K, 3)}
    for value in {v.name: v for n in model.graph for v in n.inputs if v is not None and v.name in arrays}.values():
        array = arrays[str(value.name)]
        value.const_value = ir.tensor(array, name=value.name)
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
        model.graph.register_initializer(value)
    return model


IDS = np.array([3, 0, 39, 3])


def run(path: Path) -> NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"ids": IDS})[0])


def expected(kernel: MatmulKernel, head: MatmulKernel) -> NDArray[np.float32]:
    def rounded(w: NDArray[np.float32], kernel: MatmulKernel) -> NDArray[np.float32]:
        """w [N, K]"""
        if kernel.bits == 32:
            return w
        return unpack(pack(w, kernel.bits, kernel.block, symmetric=kernel.symmetric), kernel.bits, w.shape[1])

    e = rounded(weight(VOCAB, K, 1), head)
    h = e[IDS] @ rounded(weight(K, N, 2).T, kernel).T
    return np.tanh((1 / (1 + np.exp(-h))) @ rounded(weight(N, K, 3).T, kernel).T @ e.T)


def kernel(bits: int, block: int, symmetric: bool = True) -> MatmulKernel:
    """In fp32 arithmetic, so that ONNX Runtime must agree with the unpacked weights to rounding."""
    return MatmulKernel(f"test{bits}-{block}", bits, block, 0, symmetric)


@pytest.mark.parametrize(
    "head", [kernel(8, 32), kernel(8, 64), kernel(8, 32, False), kernel(4, 32, False), FP32], ids=str
)
@pytest.mark.parametrize("layer", [kernel(8, 32), kernel(8, 128), kernel(4, 32, False), kernel(4, 64), FP32], ids=str)
def test_onnxruntime_reads_what_was_packed(layer: MatmulKernel, head: MatmulKernel, tmp_path: Path) -> None:
    """Every width of weight, groups past K among them, with the embedding read from the head's bytes."""
    model = tied_model()
    shapes = matmul_shapes(model)
    assert shapes == {(K, N): False, (N, K): False, (K, VOCAB): True}
    reports = quantize(model, {shape: head if is_head else layer for shape, is_head in shapes.items()})
    assert sum(report.matched for report in reports) == 2 * (layer.bits < 32) + (head.bits < 32)
    found = run(save_graph(model, tmp_path))
    np.testing.assert_allclose(found, expected(layer, head), rtol=0, atol=2e-5)


def test_embedding_and_head_share_one_place(tmp_path: Path) -> None:
    """Stored twice, the embedding would be a third of a small engine."""
    model = tied_model()
    quantize(model, {shape: kernel(8, 32) if is_head else FP32 for shape, is_head in matmul_shapes(model).items()})
    save_graph(model, tmp_path)
    saved = ir.load(tmp_path / GRAPH_NAME)
    places = {
        name: (tensor.offset, tensor.length)
        for name, value in saved.graph.initializers.items()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    assert places["e.q8"] == places["e.q8.rows"]
    distinct = dict(places.values())
    size = (tmp_path / WEIGHTS_NAME).stat().st_size
    assert size == max(offset + length for offset, length in places.values())
    assert len(distinct) == len(places) - 1
    assert all(offset % 4096 == 0 for offset in distinct)
    assert "e" not in saved.graph.initializers


def test_saving_keeps_the_model(tmp_path: Path) -> None:
    """The tuner's caller lowers and saves one model more than once."""
    model = tied_model()
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    first = run(save_graph(model, tmp_path))
    assert {name: value.const_value for name, value in model.graph.initializers.items()} == before
    second = run(save_graph(model, tmp_path))
    np.testing.assert_array_equal(first, second)


def test_shared_bytes_are_marked() -> None:
    """Whoever sums up sizes must be able to leave the second name out."""
    model = tied_model()
    quantize(model, {shape: kernel(8, 32) for shape in matmul_shapes(model)})
    marked: dict[str, Any] = {
        name: value.const_value.metadata_props[SAME_BYTES_AS]
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and SAME_BYTES_AS in value.const_value.metadata_props
    }
    assert marked == {"e.q8.rows": "e.q8"}
