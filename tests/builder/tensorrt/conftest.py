"""Graphs of tiny models lowered for TensorRT, and plans of them built as a user's are."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.export import export_model
from castline.builder.lower import save_graph
from castline.builder.passes.pipeline import run_passes
from castline.builder.tensorrt.kernels import KernelTarget, compile_kernels, node_attributes
from castline.builder.tensorrt.lower import Activations, lower_tensorrt
from castline.builder.tensorrt.plan_request import PlanRequest
from castline.engines.manifest import Limits
from castline.plugins.contract import PAGED_ATTENTION
from castline.plugins.tensorrt.engine import PLAN_NAME
from castline.plugins.tensorrt.flavour import installed_flavours
from castline.plugins.tensorrt.kernel_set import KERNELS_DIRECTORY

torch.set_num_threads(1)

BLOCK_SIZE = 16
LIMITS = Limits(max_model_len=256, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64)


@dataclass(frozen=True)
class Fused:
    checkpoint: Checkpoint
    model: ir.Model

    def copy(self) -> ir.Model:
        return self.model.clone()


@pytest.fixture(scope="session")
def fused(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Fused]:
    """``fused(arch, **config)``: a tiny model exported and fused, once for the same arguments."""
    made: dict[str, Fused] = {}

    def make(arch: str, **config: Any) -> Fused:
        key = repr((arch, sorted(config.items())))
        if key not in made:
            checkpoint = load_checkpoint(str(tiny_checkpoint(arch, **config)))
            model = export_model(checkpoint)
            run_passes(model, checkpoint.facts.max_position)
            made[key] = Fused(checkpoint, model)
        return made[key]

    return make


@pytest.fixture(scope="session")
def rtx() -> None:
    """Skips where TensorRT for RTX or Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: no kernels")
    if "tensorrt_rtx" not in installed_flavours():
        pytest.skip("TensorRT for RTX is not installed: no plan")


@pytest.fixture(scope="session")
def kernels_of(
    rtx: None, fork: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``kernels_of(target, model)``: the directory of a lowered graph's kernels, compiled once for nodes alike."""
    made: dict[str, Path] = {}

    def compiled(target: KernelTarget, model: ir.Model) -> Path:
        attributes = node_attributes(model)
        key = repr((target, attributes))
        if key not in made:
            directory = tmp_path_factory.mktemp("kernels")
            done = fork(compile_kernels, target, attributes, directory)
            assert done.returncode == 0, done.stderr
            made[key] = directory / KERNELS_DIRECTORY
        return made[key]

    return compiled


@pytest.fixture
def plan_of(kernels_of: Callable[..., Path], tmp_path: Path) -> Callable[..., PlanRequest]:
    """Saves a lowered graph and gives the request of its plan."""

    def prepare(model: ir.Model, compute_capability: str, activations: Activations = "fp16") -> PlanRequest:
        directory = tmp_path / compute_capability
        directory.mkdir()
        graph = save_graph(model, directory)
        pools = [int(value.shape[1]) for value in model.graph.inputs if str(value.name).startswith("kv_pool.")]  # type: ignore[index, arg-type]
        return PlanRequest(
            flavour="tensorrt_rtx",
            compute_capability=compute_capability,
            multiprocessors=100,
            graph=graph,
            kernels=kernels_of(KernelTarget(compute_capability, activations, 272, BLOCK_SIZE), model),
            plan=directory / PLAN_NAME,
            pool_bytes=tuple(pools),
            max_blocks=1000,
            limits=LIMITS,
        )

    return prepare


@pytest.fixture(scope="session")
def tools() -> Any:
    """Helpers for test modules."""

    class Tools:
        block_size = BLOCK_SIZE
        limits = LIMITS
        replace = staticmethod(replace)

        @staticmethod
        def lowered(model: ir.Model, activations: Any = "fp16", kv_dtype: Any = "fp8") -> ir.Model:
            return lower_tensorrt(model, activations=activations, kv_dtype=kv_dtype, block_size=BLOCK_SIZE)

        @staticmethod
        def attention(model: ir.Model) -> list[str]:
            return [str(node.name) for node in model.graph if node.op_type == PAGED_ATTENTION]

    return Tools
