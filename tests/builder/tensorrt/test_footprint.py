"""What an engine takes of its GPU, told from headers: against the graphs that are really lowered."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castline.builder.graph_facts import weight_sizes
from castline.builder.model_shape import read_shape
from castline.builder.tensorrt.footprint import footprint, live_bytes
from castline.builder.tensorrt.matmuls import e4m3_matmuls, layer_matmuls
from castline.builder.tensorrt.weights import quantize_fp8, quantize_int4
from castline.engines.device_memory import CONSTANT_BYTES, SLACK_BYTES, device_memory
from castline.engines.manifest import DeviceMemory
from castline.engines.precision import gpu_weights

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2")
UNTIED = {"tie_word_embeddings": False}
LOOSE_BYTES = 64
"""Sizes of a split and the like: within CONSTANT_BYTES."""


def lower(tools: Any, fused: Any, recipe: str) -> Any:
    model = fused.copy()
    if recipe == "fp8":
        quantize_fp8(model, {str(node.inputs[1].name): 8.0 for node in e4m3_matmuls(model)}, "fp16")
    if recipe == "int4":
        quantize_int4(model, "fp16")
    return tools.lowered(model, "bf16" if recipe == "bf16" else "fp16")


@pytest.fixture
def directory(tiny_checkpoint: Callable[..., Path]) -> Callable[..., str]:
    return lambda arch, **config: str(tiny_checkpoint(arch, **config))


@pytest.mark.parametrize("recipe", ["fp16", "bf16", "fp8", "int4"])
@pytest.mark.parametrize(("arch", "config"), [*((arch, {}) for arch in ARCHITECTURES), ("llama", UNTIED)])
def test_weights_are_told_to_the_byte(
    fused: Callable[..., Any],
    tools: Any,
    directory: Callable[..., str],
    arch: str,
    config: dict[str, Any],
    recipe: str,
) -> None:
    """Tied and untied heads, biases, norms of queries and keys, fused projections, the last layer's 16 bits under fp8,
    whole blocks of int4, tables of angles: one that is forgotten is a pool of another size than the plan's. fp8 has
    powers of two only in matmuls whose channels differ, and the plan counts them in all."""
    model = lower(tools, fused(arch, **config), recipe)
    shapes = read_shape(directory(arch, **config)).weights
    told = device_memory(shapes, gpu_weights(recipe), tools.limits).weight_bytes - CONSTANT_BYTES
    found = sum(weight_sizes(model).values())
    powers = 2 * sum(matmul.outputs for matmul in shapes.matmuls if not matmul.is_behind) if recipe == "fp8" else 0
    assert found - LOOSE_BYTES <= told <= found + powers


def test_matmuls_are_the_graphs(fused: Callable[..., Any], tools: Any, directory: Callable[..., str]) -> None:
    """Those behind the last attention too: names decide it for the plan, and the order of nodes for the build."""
    for arch in ARCHITECTURES:
        model = fused(arch).copy()
        shapes = read_shape(directory(arch)).weights

        def elements(found: Any) -> int:
            return sum(node.inputs[1].const_value.size for node in found)

        assert sum(one.inputs * one.outputs for one in shapes.matmuls) == elements(layer_matmuls(model))
        low = [one for one in shapes.matmuls if not one.is_behind]
        assert sum(one.inputs * one.outputs for one in low) == elements(e4m3_matmuls(model)), arch


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "gpt_neox"])
def test_scratch_memory_covers_what_is_alive(
    fused: Callable[..., Any], tools: Any, directory: Callable[..., str], arch: str
) -> None:
    """A bound under the tensors that a step needs at once is none, whatever TensorRT makes of the graph."""
    for recipe in ("fp16", "fp8", "int4"):
        model = lower(tools, fused(arch), recipe)
        bound = device_memory(read_shape(directory(arch)).weights, gpu_weights(recipe), tools.limits).scratch_bytes
        live = live_bytes(model, tools.limits)
        assert live < bound - SLACK_BYTES < 8 * live


def test_what_is_alive_is_counted(fused: Callable[..., Any], tools: Any) -> None:
    """By hand, for a llama of 64 wide and logits of 272: behind the head's matmul, the rows and their 16-bit logits; in
    a layer the residual, both halves of the MLP's inner width and what they are split from."""
    model = lower(tools, fused("llama"), "fp16")
    tokens = tools.limits.max_num_batched_tokens
    head, split = 2 * (64 + 272), 2 * (64 + 192 + 192)
    assert live_bytes(model, tools.limits) >= tokens * max(head, split)
    more = tools.replace(tools.limits, max_num_batched_tokens=2 * tokens)
    assert live_bytes(model, more) == 2 * live_bytes(model, tools.limits)


def test_a_model_that_cannot_be_planned_takes_what_its_graph_does(fused: Callable[..., Any], tools: Any) -> None:
    """GPT-2's config has other names: the build must record its figures all the same."""
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}
    model = lower(tools, fused("gpt2", **config), "fp16")
    weights = sum(weight_sizes(model).values())
    found = footprint(model, tempfile.gettempdir(), "fp16", tools.limits)
    assert found == DeviceMemory(weights, live_bytes(model, tools.limits) + SLACK_BYTES)
