"""The demo model for every chip that NVIDIA's builder takes with no GPU: whole plans, and parity of their graphs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from castline import planning
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.graph_facts import weight_sizes
from castline.builder.lower import save_graph
from castline.builder.parity import Comparison
from castline.builder.pipeline import export_and_fuse
from castline.builder.plan import make_plan
from castline.builder.progress import BuildLog
from castline.builder.replay import make_tracks, replay
from castline.builder.tensorrt.footprint import footprint
from castline.builder.tensorrt.kernels import KernelTarget
from castline.builder.tensorrt.pipeline import PROOF_CONFIG, GpuBuild, lower, plan_request, quantize
from castline.builder.tensorrt.plan_compiler import compile_plan
from castline.builder.tensorrt.proof import proof_graph, proof_kv_dtype
from castline.builder.tensorrt.recipes import activations_of, gpu_recipe
from castline.builder.tensorrt.target import choose_target
from castline.builder.torch_reference import torch_reference
from castline.builder.verify import VerifyCase, shipped_case
from castline.commands.build import resolve_options
from castline.engines.capacity import kv_block_bytes
from castline.engines.device_memory import CONSTANT_BYTES
from castline.engines.memory_plan import Asked, EngineMemory, plan_memory, sku_policy
from castline.engines.sku import load_sku
from castline.plugins.contract import PAGED_ATTENTION
from castline.plugins.cpu.session import CpuSession, SessionOptions

pytestmark = pytest.mark.slow

LAYERS = 30
LEAST_KL = {"fp16": 1e-6, "fp8": 5e-3, "int4": 1e-2}
"""Less, and the graph does not round as the type does: it was not quantised."""


@dataclass(frozen=True)
class Lowered:
    """The demo's graph as TensorRT gets it."""

    model: ir.Model
    e4m3: list[str]
    graph: Path


class Demo:
    """The demo model, exported and fused once, lowered once for each precision."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint: Checkpoint = load_checkpoint("demo")
        self.fused = export_and_fuse(self.checkpoint, self.checkpoint.facts.max_position, BuildLog()).model
        self.made: dict[tuple[str, str], Lowered] = {}

    @cached_property
    def case(self) -> VerifyCase:
        """The text that every build is verified on."""
        encode = self.checkpoint.tokenizer.backend_tokenizer.encode
        facts = self.checkpoint.facts
        return shipped_case(lambda text: encode(text).ids, facts.vocab_size, facts.max_position)

    @cached_property
    def expected(self) -> list[NDArray[np.float32]]:
        """Logits of the transformers model for each passage."""
        reference = torch_reference(self.checkpoint.model)
        return [reference(passage) for passage in self.case.passages]

    def build(self, sku: str, **options: Any) -> GpuBuild:
        asked = resolve_options(None, load_sku(sku), {"model": "demo", "output": self.directory, **options})
        target = choose_target(asked)
        plan = make_plan(asked, self.checkpoint.facts, gpu_recipe(asked.recipe))
        return GpuBuild(replace(plan, host=target.host()), target)

    def lowered(self, wanted: GpuBuild) -> Lowered:
        """Through the stages of a build."""
        key = (wanted.plan.recipe.name, wanted.plan.precision.kv_dtype)
        if key not in self.made:
            model = self.fused.clone()
            e4m3 = quantize(wanted, self.checkpoint, model, BuildLog())
            lower(wanted, model, BuildLog())
            home = self.directory / "-".join(key)
            home.mkdir()
            self.made[key] = Lowered(model, e4m3, save_graph(model, home))
        return self.made[key]


@pytest.fixture(scope="module")
def demo(rtx: None, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize(
    ("sku", "recipe", "kind", "matmuls"),
    [
        ("a100-80", "fp16", "Half", 120),
        ("a10", "int4", "Int4", 120),
        ("rtx4090", "fp8", "FP8", 117),
        ("rtx5090", "fp8", "FP8", 117),
    ],
)
def test_whole_plan_builds(
    demo: Demo, kernels_of: Callable[..., Path], tmp_path: Path, sku: str, recipe: str, kind: str, matmuls: int
) -> None:
    """30 layers by NVIDIA's own parser and builder, for 8.0, 8.6, 8.9 and 12.0, in every weight format: the plugin in
    each layer of both profiles, no KV pool copied (`check_plan`), and every matmul multiplied as it was asked for."""
    wanted = demo.build(sku, recipe=recipe)
    lowered = demo.lowered(wanted)
    capability = wanted.target.sku.compute_capability
    vocab_size = demo.checkpoint.facts.vocab_size
    target = KernelTarget(capability, activations_of(recipe), vocab_size, wanted.block_size, sku)
    attention = [str(node.name) for node in lowered.model.graph if node.op_type == PAGED_ATTENTION]
    request = plan_request(wanted, lowered.model, lowered.graph, tmp_path)
    request = replace(request, kernels=kernels_of(target, lowered.model))
    plan = compile_plan(request, attention, lowered.e4m3, timeout_s=240)
    plugins = [layer for layer in plan.layers if layer.kind == "PluginV3"]
    assert len(plugins) == 2 * LAYERS
    # qkv, cos, sin, pool, slots, query starts, lengths, table; out, pool
    assert {layer.types for layer in plugins} == {("Half", "Float", "Float", "Int8", *["Int32"] * 4, "Half", "Int8")}
    assert sum(kind in layer.types for layer in plan.layers) >= 2 * matmuls
    assert len(lowered.e4m3) == (matmuls if kind == "FP8" else 0)
    weights = lowered.graph.with_name("weights.bin").stat().st_size
    assert weights * 0.9 < plan.path.stat().st_size < weights * 1.5


@pytest.mark.parametrize(("sku", "recipe"), [("a100-80", "fp16"), ("a10", "int4"), ("l4", "fp8")])
def test_the_pool_is_planned_before_the_build(demo: Demo, sku: str, recipe: str) -> None:
    """`castline plan --model demo` promises the blocks that the built engine has; weights within 0.3 % of the graph's
    (fp8 counts powers of two in every matmul)."""
    wanted = demo.build(sku, recipe=recipe)
    lowered, chip = demo.lowered(wanted), load_sku(sku)
    limits, facts = wanted.plan.limits(wanted.block_size), demo.checkpoint.facts
    device = footprint(lowered.model, "demo", recipe, limits)
    kept = wanted.plan.precision.kv_dtype
    engine = EngineMemory.on_device(device)
    built = plan_memory(facts, kept, limits, engine, chip.memory_bytes, Asked(), sku_policy(chip))
    assert planning.plan("demo", chip, {"recipe": recipe}, Asked(), None).memory == built
    weights = sum(weight_sizes(lowered.model).values())
    assert weights <= device.weight_bytes <= weights * (1.003 if recipe == "fp8" else 1) + CONSTANT_BYTES


@pytest.mark.parametrize(
    ("sku", "recipe", "kv_dtype"),
    [("a100-80", "fp16", "auto"), ("a10", "int4", "auto"), ("rtx4090", "fp8", "auto")],
)
def test_graph_is_within_its_gate(demo: Demo, tmp_path: Path, sku: str, recipe: str, kv_dtype: str) -> None:
    """The graph that TensorRT gets, executed by ONNX Runtime, against transformers: a real model, real weights, and the
    very gate of the build, so that a default build is known to pass it, and a wrong scale or layer to fail it."""
    wanted = demo.build(sku, recipe=recipe, kv_dtype=kv_dtype)
    lowered = demo.lowered(wanted)
    plan, facts = wanted.plan, demo.checkpoint.facts
    kept, limits = plan.precision.kv_dtype, plan.limits(wanted.block_size)
    block_bytes = kv_block_bytes(facts.num_kv_heads, facts.head_dim, wanted.block_size, proof_kv_dtype(kept))
    found = Comparison()
    with CpuSession(
        save_graph(proof_graph(lowered.model, kept), tmp_path),
        num_blocks=demo.case.num_blocks(wanted.block_size),
        block_size=wanted.block_size,
        block_bytes=block_bytes,
        options=SessionOptions(num_threads=1, config=PROOF_CONFIG),
    ) as session:
        for tensors, rows in replay(make_tracks(demo.case.passages, wanted.block_size), limits):
            logits, first = session.step(tensors), 0
            for row in rows:
                size = row.stop - row.start
                targets = np.full(size, -1)
                found.add(demo.expected[row.sequence][row.start : row.stop], logits[first : first + size], targets)
                first += size
    tolerance = plan.recipe.tolerance_for(kept)
    assert found.num_tokens == sum(map(len, demo.case.passages))
    assert found.mean_kl <= tolerance.mean_kl
    assert found.top1_agreement >= tolerance.top1
    assert found.mean_kl > LEAST_KL[recipe]
