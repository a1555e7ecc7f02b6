"""The graph that TensorRT gets: its types, its interface, and nothing in it that TensorRT has not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from castline.builder.lower import save_graph
from castline.engines.errors import BuildError
from castline.plugins.contract import DOMAIN, PAGED_ATTENTION, QkNorm

HALVES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
FLOATS = (ir.DataType.FLOAT, *HALVES.values())
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox", "gpt2")
CONFIG: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("activations", ["fp16", "bf16"])
def test_every_tensor_has_the_type_it_should(
    fused: Callable[..., Any], tools: Any, tmp_path: Path, arch: str, activations: str
) -> None:
    """Strongly typed: a float left over in the middle is a slow kernel or a refusal by the parser, and a cosine in 16
    bits is a wrong angle at long positions. ONNX's own checker and shape inference must agree."""
    model = tools.lowered(fused(arch, **CONFIG.get(arch, {})).copy(), activations, "bf16")
    half = HALVES[activations]
    for node in model.graph:
        assert node.domain == "" or (node.domain, node.op_type) == (DOMAIN, PAGED_ATTENTION)
        if node.op_type == PAGED_ATTENTION:
            assert node.inputs[0].dtype == node.outputs[0].dtype == half
            assert None not in node.inputs
            optional = 2 * (node.attributes["rotary_dim"].as_int() > 0)
            optional += 2 * (node.attributes["qk_norm"].as_int() != QkNorm.NONE)
            assert all(value.dtype == ir.DataType.FLOAT for value in node.inputs[1 : 1 + optional])
            assert node.inputs[1 + optional].dtype == node.outputs[1].dtype == ir.DataType.INT8
            assert len(node.inputs) == 6 + optional
        elif node.op_type != "Cast":
            kinds = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
            assert len(kinds & set(FLOATS)) <= 1, (node.name, kinds)
        if node.op_type == "MatMul" and node.inputs[1].is_initializer():
            assert node.inputs[1].dtype == half
    outputs = {value.name: value.dtype for value in model.graph.outputs}
    assert outputs.pop("logits") == ir.DataType.FLOAT
    assert set(outputs.values()) == {ir.DataType.INT8}
    inputs = {str(value.name): value.dtype for value in model.graph.inputs}
    assert {inputs[name] for name in inputs if not name.startswith("kv_pool.")} == {ir.DataType.INT32}
    path = save_graph(model, tmp_path)
    onnx.checker.check_model(str(path))
    onnx.shape_inference.infer_shapes_path(str(path), str(tmp_path / "inferred.onnx"), strict_mode=True)


def test_only_16_bit_weights_are_written(fused: Callable[..., Any], tools: Any, tmp_path: Path) -> None:
    """The float32 weights that they came from are twice as large, and nothing reads them any more."""
    model = tools.lowered(fused("llama").copy())
    save_graph(model, tmp_path)
    parameters = sum(p.numel() for p in fused("llama").checkpoint.model.parameters())
    assert (tmp_path / "weights.bin").stat().st_size < 2 * parameters + 4096 * len(model.graph.initializers)


def test_nodes_have_names_to_be_found_by(fused: Callable[..., Any], tools: Any) -> None:
    """TensorRT's log and its errors name layers by them."""
    model = tools.lowered(fused("llama").copy())
    names = [node.name for node in model.graph]
    assert all(names)
    assert len(set(names)) == len(names)
    assert tools.attention(model) == ["attention.0", "attention.1"]


def test_operator_that_tensorrt_has_not_is_named(fused: Callable[..., Any], tools: Any) -> None:
    """It would come out as a parser's riddle, after the weights were written."""
    model = fused("llama").copy()
    node = next(node for node in model.graph if node.op_type == "Sigmoid")
    node.domain = "com.microsoft"
    with pytest.raises(BuildError, match=r"lower: com\.microsoft::Sigmoid \(.*\) is no operator that TensorRT has"):
        tools.lowered(model)
