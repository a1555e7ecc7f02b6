"""The GPU kernels of an engine: which its graph needs, compiled into the bundle. Needs Triton, and no GPU."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

import onnx_ir as ir

from castline.builder.passes.walk import attribute, ours
from castline.builder.tensorrt.kernel_shapes import attention_kernels, sampling_kernels
from castline.builder.tensorrt.lower import Activations
from castline.engines.errors import BuildError
from castline.engines.kernel_choices import kernel_choices
from castline.plugins.contract import PAGED_ATTENTION, AttentionAttributes
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, kernel_set
from castline.plugins.tensorrt.kernel_set import KERNELS_DIRECTORY, KernelSet, write_kernel_set


@dataclass(frozen=True, slots=True)
class KernelTarget:
    compute_capability: str
    activations: Activations
    vocab_size: int
    block_size: int
    sku: str = ""
    """Whose choices are taken (`castline.engines.kernel_choices`); empty takes what fits."""


def node_attributes(model: ir.Model) -> list[AttentionAttributes]:
    """Of every attention node of a lowered graph, in order of layers."""
    return [
        AttentionAttributes(**{f.name: attribute(node, f.name) for f in fields(AttentionAttributes)})
        for node in ours(model, PAGED_ATTENTION)
    ]


def require_compiler() -> None:
    """Raises BuildError where kernels cannot be compiled."""
    if find_spec("triton") is None:
        raise BuildError("kernels: Triton is not installed: pip install 'castline[build-gpu]'")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise BuildError("kernels: TRITON_INTERPRET is set, so Triton interprets kernels: unset it to compile them")


def compile_kernels(target: KernelTarget, attention: Sequence[AttentionAttributes], directory: Path) -> KernelSet:
    """Compiles what the nodes need, once for nodes that are alike, and the sampler's; writes them under *directory*.

    Raises BuildError naming the kernel that cannot be compiled.
    """
    require_compiler()
    major, minor = map(int, target.compute_capability.split("."))
    compiler = KernelCompiler((major, minor), target.activations)
    choices = kernel_choices(target.sku)
    compiled: list[Compiled] = []
    for a in dict.fromkeys(replace(a, layer=0) for a in attention):
        compiled += attention_kernels(compiler, choices, a)
    compiled += sampling_kernels(compiler, choices, target.vocab_size, target.block_size)
    home = directory / KERNELS_DIRECTORY
    home.mkdir(parents=True, exist_ok=True)
    for one in compiled:
        (home / one.spec.cubin).write_bytes(one.cubin)
    kernels = kernel_set(compiler.compute_capability, compiled)
    write_kernel_set(home, kernels)
    return kernels
