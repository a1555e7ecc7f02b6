"""The graph that TensorRT gets, executed by ONNX Runtime with the cpu plugin, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from castline.builder.lower import save_graph
from castline.builder.tensorrt.calibrate import calibrate
from castline.builder.tensorrt.matmuls import layer_matmuls
from castline.builder.tensorrt.proof import proof_graph, proof_kv_dtype
from castline.builder.tensorrt.weights import quantize_fp8, quantize_int4
from castline.builder.torch_reference import torch_reference
from castline.builder.verify import VerifyCase, measure
from castline.engines.capacity import kv_block_bytes
from castline.plugins.cpu.session import CpuSession, SessionOptions

RANDOM = np.random.default_rng(11)
CASE = VerifyCase(
    passages=tuple(tuple(RANDOM.integers(3, 272, length).tolist()) for length in (90, 41, 17)),
    prompts=((5, 9, 40), (7, 100, 30, 12)),
    greedy_tokens=4,
)


def divergence(built: Any, lowered: ir.Model, kv_dtype: Any, directory: Path, tools: Any) -> tuple[float, float]:
    """(mean KL, top-1 agreement) over the passages, in steps of many tokens or of few, whichever is worse."""
    facts = built.checkpoint.facts
    block_bytes = kv_block_bytes(facts.num_kv_heads, facts.head_dim, tools.block_size, proof_kv_dtype(kv_dtype))
    with CpuSession(
        save_graph(proof_graph(lowered, kv_dtype), directory),
        num_blocks=CASE.num_blocks(tools.block_size),
        block_size=tools.block_size,
        block_bytes=block_bytes,
        options=SessionOptions(num_threads=1),
    ) as session:
        measured = measure(CASE, session, torch_reference(built.checkpoint.model), tools.limits)
    kinds = measured.comparisons.values()
    return max(kind.mean_kl for kind in kinds), min(kind.top1_agreement for kind in kinds)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"])
def test_fp16_graph_is_the_model(fused: Callable[..., Any], tools: Any, tmp_path: Path, arch: str) -> None:
    """Every rewrite on the way to TensorRT is in this graph: a wrong one is a wrong model, whatever the device does.

    A random model's layers amplify rounding, which is all there may be."""
    built = fused(arch)
    lowered = tools.lowered(built.copy(), "fp16", "fp16")
    kl, top1 = divergence(built, lowered, "fp16", tmp_path, tools)
    assert kl < 3e-4
    assert top1 > 0.95


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_bf16_graph_is_the_model(fused: Callable[..., Any], tools: Any, tmp_path: Path, arch: str) -> None:
    """As fp16, with three bits less of mantissa."""
    built = fused(arch)
    lowered = tools.lowered(built.copy(), "bf16", "bf16")
    kl, top1 = divergence(built, lowered, "bf16", tmp_path, tools)
    assert kl < 2e-2
    assert top1 > 0.8


def test_quantised_graphs_lose_what_their_types_lose(fused: Callable[..., Any], tools: Any, tmp_path: Path) -> None:
    """e4m3 and 4-bit weights go through QuantizeLinear and DequantizeLinear in ONNX Runtime too: scales on the wrong
    axis, or of another tensor, give noise, which is a KL of whole nats."""
    built = fused("llama")
    found = {}
    for recipe in ("fp16", "fp8", "int4"):
        model = built.copy()
        if recipe == "fp8":
            quantize_fp8(model, calibrate(built.model, CASE.passages), "fp16")
        if recipe == "int4":
            quantize_int4(model, "fp16")
        directory = tmp_path / recipe
        directory.mkdir()
        found[recipe], _ = divergence(built, tools.lowered(model, "fp16", "fp16"), "fp16", directory, tools)
    assert found["fp16"] < found["fp8"] < found["int4"]
    assert found["fp8"] < 0.15
    assert found["int4"] < 1.0


def test_a_wrong_scale_is_seen(fused: Callable[..., Any], tools: Any, tmp_path: Path) -> None:
    """C10: the proof must be able to fail. One activation scale of 64 times too little saturates one matmul."""
    built = fused("llama")
    model = built.copy()
    absmax = calibrate(built.model, CASE.passages)
    name = str(layer_matmuls(model)[1].inputs[1].name)  # type: ignore[union-attr]
    quantize_fp8(model, absmax | {name: absmax[name] / 64}, "fp16")
    kl, _ = divergence(built, tools.lowered(model, "fp16", "fp16"), "fp16", tmp_path, tools)
    assert kl > 0.3


def test_weights_are_the_bytes_that_tensorrt_gets(fused: Callable[..., Any], tools: Any, tmp_path: Path) -> None:
    """A proof over other weights proves nothing."""
    lowered = tools.lowered(fused("llama").copy())
    kept = proof_graph(lowered, "fp8").graph.initializers
    for name, value in lowered.graph.initializers.items():
        assert kept[name].const_value is value.const_value
