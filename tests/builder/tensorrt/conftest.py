"""Graphs of tiny models lowered for TensorRT, and plans of them built as a user's are."""

import subprocess
import sys
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
from castline.builder.tensorrt.kernels import KernelTarget, node_attributes
from castline.builder.tensorrt.lower import lower_tensorrt
from castline.builder.tensorrt.plan_request import PlanRequest
from castline.engines.manifest import Limits
from castline.plugins.contract import PAGED_ATTENTION
from castline.plugins.tensorrt.engine import PLAN_NAME
from castline.plugins.tensorrt.flavour import installed_flavours

torch.set_num_threads(1)

BLOCK_SIZE = 16
LIMITS = Limits(max_model_len=256, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64)
_COMPILE = """
from pathlib import Path
from castline.builder.tensorrt.kernels import KernelTarget, compile_kernels
from castline.plugins.contract import AttentionAttributes
compile_kernels({target!r}, {attributes!r}, Path({directory!r}))
"""


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


@pytest.fixture
def plan_of(rtx: None, tmp_path: Path, compile_environment: dict[str, str]) -> Callable[..., PlanRequest]:
    """Saves a lowered graph with its kernels, compiled in a process of their own, and gives the request of its plan."""

    def prepare(model: ir.Model, compute_capability: str, activations: str = "fp16") -> PlanRequest:
        directory = tmp_path / compute_capability
        directory.mkdir()
        graph = save_graph(model, directory)
        target = KernelTarget(compute_capability, activations, 272, BLOCK_SIZE)  # type: ignore[arg-type]
        code = _COMPILE.format(target=target, attributes=node_attributes(model), directory=str(directory))
        subprocess.run([sys.executable, "-c", code], env=compile_environment, check=True)
        pools = [int(value.shape[1]) for value in model.graph.inputs if str(value.name).startswith("kv_pool.")]  # type: ignore[index, arg-type]
        return PlanRequest(
            flavour="tensorrt_rtx",
            compute_capability=compute_capability,
            multiprocessors=100,
            graph=graph,
            kernels=directory / "kernels",
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
