"""Plans of tiny graphs by NVIDIA's own parser and builder, on a machine with no GPU."""

import os
import re
import signal
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from castline.builder.tensorrt import plan_compiler
from castline.builder.tensorrt.kernels import node_attributes
from castline.builder.tensorrt.matmuls import e4m3_matmuls, layer_matmuls
from castline.builder.tensorrt.plan_compiler import compile_plan
from castline.builder.tensorrt.plan_request import PlanRequest, profiles
from castline.builder.tensorrt.weights import quantize_fp8, quantize_int4
from castline.engines.errors import BuildError


@pytest.mark.parametrize("capability", ["8.0", "8.9"])
def test_plan_builds_with_a_plugin_in_every_layer(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any, capability: str
) -> None:
    """The whole point of the target: a real plan from a machine with no GPU, and no layer that fell back to anything.

    From 8.9 on with e4m3 matmuls; before, with 4-bit weights. `test_demo` builds for 8.6 and 12.0 besides, and
    checks the same."""
    model = fused("llama").copy()
    names = [str(node.name) for node in e4m3_matmuls(model)]
    if capability == "8.9":
        weights = [str(node.inputs[1].name) for node in layer_matmuls(model)]
        assert quantize_fp8(model, dict.fromkeys(weights, 3.0), "fp16") == len(names)
        assert len(names) == 5
    else:
        assert quantize_int4(model, "fp16") == 8
        names = []
    request = plan_of(tools.lowered(model), capability)
    plan = compile_plan(request, tools.attention(model), names, timeout_s=240)
    assert plan.path.stat().st_size > 100_000
    plugins = [layer for layer in plan.layers if layer.kind == "PluginV3"]
    assert [layer.name for layer in plugins] == [
        "attention.0", "attention.1", "attention.0 [profile 1]", "attention.1 [profile 1]",
    ]  # fmt: skip
    for layer in plugins:
        # qkv, cos, sin, pool, slots, query starts, lengths, table; out, pool
        assert layer.types == ("Half", "Float", "Float", "Int8", *["Int32"] * 4, "Half", "Int8")
    weights_as = "FP8" if names else "Int4"
    assert sum(weights_as in layer.types for layer in plan.layers) >= 2 * (len(names) or 8)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_bf16_plan_of_norms_windows_and_soft_caps(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any, arch: str
) -> None:
    """QK-norm adds two inputs to the node; windows and soft-caps alternate over layers; logits stay float32."""
    model = tools.lowered(fused(arch).copy(), "bf16", "bf16")
    plan = compile_plan(plan_of(model, "8.6", "bf16"), tools.attention(model), timeout_s=240)
    plugins = [layer for layer in plan.layers if layer.kind == "PluginV3"]
    floats = 4 if arch == "qwen3" else 2
    assert {layer.types for layer in plugins} == {
        ("BFloat16", *["Float"] * floats, "Int8", *["Int32"] * 4, "BFloat16", "Int8")
    }


def test_plan_keeps_the_attributes_of_its_plugins(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any
) -> None:
    """A plugin's fields are addresses that TensorRT reads after the call: freed too early, the plan holds noise, and
    only execution would show it. In the plan's bytes each name is followed by its type and value."""
    model = tools.lowered(fused("gemma2").copy())
    plan = compile_plan(plan_of(model, "8.9"), tools.attention(model), timeout_s=240).path.read_bytes()
    wanted = node_attributes(model)
    for field in fields(wanted[0]):
        kind, code = (b"INT32", "<i") if field.type is int else (b"FP32", "<f")
        pattern = b"\0" + field.name.encode() + rb"\x07.{8,60}?" + kind + rb".{14}(.{4})"
        found = {struct.unpack(code, value)[0] for value in re.findall(pattern, plan, re.DOTALL)}
        assert found == {struct.unpack(code, struct.pack(code, getattr(a, field.name)))[0] for a in wanted}, field.name


def test_e4m3_where_the_chip_has_none_is_refused_in_the_builders_words(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any
) -> None:
    """An RTX 30 cannot multiply e4m3: the build must say so, and not fall back in silence."""
    model = fused("llama").copy()
    weights = [str(node.inputs[1].name) for node in layer_matmuls(model)]
    quantize_fp8(model, dict.fromkeys(weights, 3.0), "fp16")
    request = plan_of(tools.lowered(model), "8.6")
    with pytest.raises(BuildError, match=r"plan: tensorrt_rtx cannot build it for 8\.6: .*(?i:fp8)"):
        compile_plan(request, tools.attention(model), timeout_s=240)
    assert not request.plan.exists()


def test_capability_that_rtx_lacks_is_refused(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any
) -> None:
    """set_compute_capability answers False and goes on: a plan for the wrong chip would come out."""
    model = tools.lowered(fused("llama").copy())
    request = replace(plan_of(model, "8.9"), compute_capability="9.0")
    with pytest.raises(BuildError, match=r"does not build for compute capability 9\.0; it does for 7\.5, 8\.0"):
        compile_plan(request, tools.attention(model), timeout_s=240)


def test_parser_errors_name_the_node(
    fused: Callable[..., Any], plan_of: Callable[..., PlanRequest], tools: Any
) -> None:
    """A graph that TensorRT cannot read: the message must say where, in the graph's own names."""
    model = tools.lowered(fused("llama").copy())
    request = plan_of(model, "8.9")
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "NoSuchOperator"
    request.graph.write_bytes(ir.to_proto(model).SerializeToString())
    with pytest.raises(BuildError, match=r"node .*\(NoSuchOperator\)"):
        compile_plan(request, tools.attention(model), timeout_s=240)


def test_process_that_dies_is_reported(
    plan_of: Callable[..., PlanRequest], fused: Callable[..., Any], tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT ends the process on some failures; the build must say so, and not hang or blame itself."""
    model = tools.lowered(fused("llama").copy())
    request = plan_of(model, "8.9")
    monkeypatch.setattr(plan_compiler, "WORKER", "this")
    with pytest.raises(BuildError, match=r"the process that builds it ended with 0: .*Namespaces"):
        compile_plan(request, tools.attention(model), timeout_s=240)
    monkeypatch.setattr(plan_compiler, "WORKER", "castline.builder.tensorrt.plan_worker")
    monkeypatch.setattr(plan_compiler, "encode", lambda asked: os.kill(os.getpid(), signal.SIGCHLD) or b"{}")
    with pytest.raises(BuildError, match=r"the process that builds it ended with 1: .*missing required field"):
        compile_plan(request, tools.attention(model), timeout_s=240)


def test_profiles_hold_every_step_of_the_scheduler(tmp_path: Path, tools: Any) -> None:
    """A step outside a profile fails on the device: one token, all tokens, prompt log-probabilities, any pool."""
    request = PlanRequest(
        "tensorrt_rtx", "8.9", 128, tmp_path, tmp_path, tmp_path, (1024, 2048), 500, tools.limits
    )  # fmt: skip
    mixed, decode = profiles(request)
    assert mixed["input_ids"] == ((1,), (64,), (64,))
    assert mixed["logits_indices"] == ((1,), (2,), (64,))
    assert mixed["cu_query_lens"] == ((2,), (3,), (9,))
    assert decode["input_ids"] == decode["kv_lens"] == decode["logits_indices"] == ((1,), (2,), (8,))
    assert decode["block_table"] == ((1, 1), (2, 16), (8, 16))
    assert mixed["kv_pool.1"] == decode["kv_pool.1"] == ((1, 2048), (1, 2048), (500, 2048))
    assert set(mixed) == set(decode)
