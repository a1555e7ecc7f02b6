"""Weights in 8 and 4 bits: codes and scales give back what they must, and no matmul is left out in silence."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from castline.builder.tensorrt.matmuls import e4m3_matmuls, head_matmul, layer_matmuls
from castline.builder.tensorrt.weights import quantize_fp8, quantize_int4
from castline.engines.errors import BuildError


def values(model: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def originals(model: ir.Model) -> dict[str, np.ndarray[Any, Any]]:
    return {str(node.inputs[1].name): node.inputs[1].const_value.numpy() for node in layer_matmuls(model)}  # type: ignore[union-attr]


def test_e4m3_weights_have_a_scale_for_each_channel(fused: Callable[..., Any]) -> None:
    """A small channel must keep its precision beside a large one, and a scale that fp16 rounds must round the codes."""
    model = fused("llama").copy()
    name = "model.layers.0.mlp.down_proj.weight.T"
    weight = model.graph.initializers[name]
    scaled = weight.const_value.numpy() * np.exp2(-(np.arange(64) % 9)).astype(np.float32)
    weight.const_value = ir.tensor(scaled.astype(np.float32), name=name)
    before = originals(model)
    names = [str(node.inputs[1].name) for node in e4m3_matmuls(model)]  # type: ignore[union-attr]
    assert quantize_fp8(model, dict.fromkeys(before, 5.0), "fp16") == len(names) == 5
    for one in names:
        original = before[one]
        codes, scale = values(model, f"{one}.e4m3").astype(np.float32), values(model, f"{one}.scale")
        assert scale == scale.astype(np.float16).astype(np.float32)
        shift = values(model, f"{one}.shift") if f"{one}.shift" in model.graph.initializers else np.ones(1)
        assert np.all(np.log2(shift) == np.rint(np.log2(shift)))
        restored = codes * scale * shift
        largest = np.abs(original).max(0)
        assert np.all(np.abs(restored - original) <= np.maximum(np.abs(original) * 2**-4, largest * 2**-16) * 1.01)
    assert values(model, f"{name}.shift").min() < 0.01


def test_activations_share_a_scale_where_they_are_one(fused: Callable[..., Any]) -> None:
    """Q/DQ pairs are one for each input and scale, and every layer's matmul reads through one; the head does not."""
    model = fused("llama").copy()
    quantize_fp8(model, dict.fromkeys(originals(model), 448.0), "fp16")
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 5
    assert sum(node.op_type == "DequantizeLinear" for node in model.graph) == 10
    head = head_matmul(model)
    assert head is not None
    assert all(value.producer() is None or "Dequantize" not in value.producer().op_type for value in head.inputs)


def test_what_is_behind_the_last_attention_keeps_16_bits(fused: Callable[..., Any]) -> None:
    """What those matmuls round goes straight into the logits: in the demo model a sixth of all that fp8 costs."""
    model = fused("llama").copy()
    quantize_fp8(model, dict.fromkeys(originals(model), 5.0), "fp16")
    kept = [str(node.inputs[1].name) for node in layer_matmuls(model) if node.inputs[1].is_initializer()]  # type: ignore[union-attr]
    assert [name.removeprefix("model.layers.1.").split(".")[1] for name in kept] == ["o_proj", "gate_up", "down_proj"]


def test_input_that_calibration_did_not_see_is_an_error(fused: Callable[..., Any]) -> None:
    """A scale made up would saturate or waste the type."""
    with pytest.raises(BuildError, match=r"the input of model\.layers\.0.* was not seen in calibration"):
        quantize_fp8(fused("llama").copy(), {}, "fp16")


@pytest.mark.parametrize("activations", ["fp16", "bf16"])
def test_int4_weights_are_within_half_a_step(fused: Callable[..., Any], activations: str) -> None:
    """Blocks along K, the largest that divides it; a K that none divides keeps 16 bits."""
    model = fused("llama", intermediate_size=100).copy()
    before = originals(model)
    assert quantize_int4(model, activations) == 6
    for name, original in before.items():
        if "down_proj" in name:
            assert f"{name}.int4" not in model.graph.initializers
            continue
        codes, scale = values(model, f"{name}.int4").astype(np.float32), values(model, f"{name}.scale")
        assert codes.min() >= -7
        block = original.shape[0] // scale.shape[0]
        assert block == 64
        half = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[activations]
        assert np.array_equal(scale, scale.astype(half).astype(np.float32))
        step = np.repeat(scale, block, 0)
        assert np.all(np.abs(codes * step - original) <= step * (0.5 + (0.03 if activations == "bf16" else 0.01)))


def test_zero_weights_stay_zero(fused: Callable[..., Any]) -> None:
    """A pruned channel or block has no largest weight: its scale must not be 0, nor its codes NaN."""
    for quantise, suffix in ((lambda m, n: quantize_fp8(m, dict.fromkeys(n, 1.0), "fp16"), "e4m3"),
                             (lambda m, n: quantize_int4(m, "fp16"), "int4")):  # fmt: skip
        model = fused("llama").copy()
        name = "model.layers.0.mlp.gate_up.weight.T"
        zeros = np.zeros_like(values(model, name))
        model.graph.initializers[name].const_value = ir.tensor(zeros, name=name)
        quantise(model, originals(model))
        assert not values(model, f"{name}.{suffix}").astype(np.float32).any()
        assert (values(model, f"{name}.scale") > 0).all()
