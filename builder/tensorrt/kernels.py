"""The GPU kernels of an engine: which its graph needs, compiled into the bundle. Needs Triton, and no GPU."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import onnx_ir as ir

from castline.builder.passes.walk import attribute, ours
from castline.builder.tensorrt.kernel_shapes import attention_shapes, sampling_shapes
from castline.builder.tensorrt.lower import Activations
from castline.engines.errors import BuildError
from castline.engines.kernel_choices import kernel_choices
from castline.plugins.contract import PAGED_ATTENTION, AttentionAttributes
from castline.plugins.tensorrt.compile import Compiled, KernelCompiler, KernelShape, kernel_set
from castline.plugins.tensorrt.kernel_set import KERNELS_DIRECTORY, KernelName, KernelSet, write_kernel_set

ATTENTION_KERNELS: Final[tuple[KernelName, ...]] = ("rope_append", "decode", "decode_split", "decode_merge", "prefill")
SAMPLING_KERNELS: Final[tuple[KernelName, ...]] = ("greedy", "sample", "gather_inputs")


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
        for name in ATTENTION_KERNELS:
            compiled.append(
                _first_fitting((partial(_attention, compiler, a, name, shape), note)
                               for shape, note in attention_shapes(choices, name, a))
            )  # fmt: skip
    for name in SAMPLING_KERNELS:
        compiled.append(
            _first_fitting((partial(_sampling, compiler, target, name, shape), note)
                           for shape, note in sampling_shapes(choices, name))
        )  # fmt: skip
    home = directory / KERNELS_DIRECTORY
    home.mkdir(parents=True, exist_ok=True)
    for one in compiled:
        (home / one.spec.cubin).write_bytes(one.cubin)
    kernels = kernel_set(compiler.compute_capability, compiled)
    write_kernel_set(home, kernels)
    return kernels


def _attention(compiler: KernelCompiler, a: AttentionAttributes, name: KernelName, shape: KernelShape) -> Compiled:
    return next(compiler.attention(a, shape, (name,)))


def _sampling(compiler: KernelCompiler, target: KernelTarget, name: KernelName, shape: KernelShape) -> Compiled:
    made = compiler.sampling(target.vocab_size, target.block_size, shape.num_warps, (name,), chunk=shape.tile)
    return next(made)


def _first_fitting(makers: Iterable[tuple[Callable[[], Compiled], str]]) -> Compiled:
    """The first kernel that compiles, with how it was chosen; raises the BuildError of the last where none does."""
    failure: BuildError | None = None
    for make, chosen in makers:
        try:
            made = make()
        except BuildError as error:
            failure = error
        else:
            return replace(made, spec=replace(made.spec, chosen=chosen))
    assert failure is not None
    raise failure
