"""Compiles the kernels of an engine to cubins. Needs Triton, and no GPU and no driver.

For each set of attention attributes in the graph there is one decode, one split decode and one prefill kernel, with the
shape of work (`KernelShape`) that is best known for the GPU (`castline.engines.kernel_choices`). A kernel that spills
registers, or that wants more shared memory than the GPU has, is refused.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from castline.engines.errors import BuildError
from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm
from castline.plugins.tensorrt.kernel_set import (
    Argument,
    ArgumentType,
    KernelName,
    KernelSet,
    KernelSpec,
    attributes_key,
)

WARP: Final = 32
HARDWARE_E4M3: Final = (8, 9)
"""Compute capability from which e4m3 is a hardware type."""
SHARED_BYTES: Final = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10,
                       (10, 3): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10}  # fmt: skip
"""Of one block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
MAX_SPLITS: Final = 32
SAMPLE_CHUNK: Final = 1024
GATHER_WIDTH: Final = 128
ALIGNED: Final = frozenset(("qkv", "cos", "sin", "q_weight", "k_weight", "pool", "q", "q_out", "out", "partial"))
"""Tensors whose rows are loaded by vectors: their addresses are multiples of VECTOR_BYTES. Unless the compiler knows,
it loads element by element, with twice the registers and no asynchronous copies."""
VECTOR_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a kernel cuts its work: what a tuner chooses. Results do not depend on it."""

    tile: int = 64
    """Keys of one step of the loop."""
    queries: int = 16
    """Tokens of a prefill tile."""
    num_warps: int = 4
    num_stages: int = 2
    max_splits: int = MAX_SPLITS
    """Most parts that `decode_merge` joins; a power of two."""


@dataclass(frozen=True, slots=True)
class Compiled:
    spec: KernelSpec
    cubin: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """What Triton compiles: a kernel with the types of its parameters and the values of its constants."""

    name: KernelName
    signature: dict[str, str]
    constants: dict[str, Any]
    hints: dict[tuple[int], list[list[Any]]]
    """Of alignment, by the parameter's place."""
    shape: KernelShape


@dataclass(frozen=True, slots=True)
class Binary:
    entry: str
    cubin: bytes
    num_warps: int
    shared_bytes: int


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """Compiles for one compute capability and one type of activations."""

    compute_capability: tuple[int, int]
    activations: str
    """``fp16`` or ``bf16``."""

    def attention(self, a: AttentionAttributes, shape: KernelShape, names: tuple[KernelName, ...] = (
        "rope_append", "decode", "decode_split", "decode_merge", "prefill"
    )) -> Iterator[Compiled]:  # fmt: skip
        """The kernels of a node with attributes *a*. Raises BuildError where one spills or does not fit."""
        for name in names:
            yield self._compile(name, self._attention_constants(name, a, shape), shape, attributes_key(a), a)

    def sampling(self, vocab_size: int, block_size: int, num_warps: int = 8, names: tuple[KernelName, ...] = (
        "greedy", "sample", "gather_inputs"
    ), chunk: int = SAMPLE_CHUNK) -> Iterator[Compiled]:  # fmt: skip
        """The kernels that every engine has one of; *chunk* logits are looked at together, a power of two.

        Raises BuildError where one spills.
        """
        for name in names:
            constants = {"vocab": vocab_size, "chunk": chunk}
            if name == "gather_inputs":
                constants, num_warps = {"block_size": block_size, "width": GATHER_WIDTH}, 4
            yield self._compile(name, constants, KernelShape(num_warps=num_warps, num_stages=1))

    def _attention_constants(self, name: KernelName, a: AttentionAttributes, shape: KernelShape) -> dict[str, Any]:
        padded, group = power_of_two(a.head_dim, 16), a.num_heads // a.num_kv_heads
        heads = {"heads": a.num_heads, "dim": a.head_dim, "padded": padded}
        if name == "decode_merge":
            return {**heads, "max_splits": shape.max_splits}
        paged = {**heads, "kv_heads": a.num_kv_heads, "block_size": a.block_size, "kind": self._kind(a)}
        if name == "rope_append":
            full = power_of_two(a.num_heads * a.head_dim) if a.qk_norm == QkNorm.FULL else padded
            rope = {"rotary": a.rotary_dim, "interleaved": a.rope_interleaved}
            return {**paged, **rope, "norm": int(a.qk_norm), "padded_all": full, "eps": a.norm_eps}
        scores = {**paged, "tile": shape.tile, "scale": a.scale, "window": a.window, "softcap": a.softcap}
        if name == "prefill":
            rows = power_of_two(group)
            return {**scores, "queries": max(shape.queries, 16 // rows), "group_rows": rows}
        return {**scores, "rows": power_of_two(group, 16)}

    def _kind(self, a: AttentionAttributes) -> int:
        if a.kv_dtype != KvDtypeCode.FP8:
            return 0
        return 1 if self.compute_capability >= HARDWARE_E4M3 else 2

    def _compile(
        self, name: KernelName, constants: dict[str, Any], shape: KernelShape, key: str = "",
        attributes: AttentionAttributes | None = None,
    ) -> Compiled:  # fmt: skip
        function = kernel_function(name)
        types = self._pointer_types(attributes)
        signature, arguments, hints = {}, [], {}
        for place, parameter in enumerate(function.arg_names):
            if parameter in constants:
                signature[parameter] = "constexpr"
                continue
            signature[parameter] = types.get(parameter, "i32")
            kind: ArgumentType = "pointer" if signature[parameter].startswith("*") else "i32"
            alignment = VECTOR_BYTES if parameter in ALIGNED else 1
            if alignment > 1:
                hints[(place,)] = [["tt.divisibility", alignment]]
            arguments.append(Argument(parameter, kind, alignment))
        binary = self._assemble(Source(name, signature, constants, hints, shape))
        cubin = binary.cubin
        usage = resource_usage(cubin)
        self._check(name, usage, binary.shared_bytes)
        file = f"{name}{'-' if key else ''}{key}.cubin"
        fixed = {k: v for k, v in constants.items() if isinstance(v, int | float | str)}
        return Compiled(
            KernelSpec(name, binary.entry, file, tuple(arguments), fixed, binary.num_warps, binary.shared_bytes,
                       usage.registers, usage.spill_bytes, key),
            cubin,
        )  # fmt: skip

    def _assemble(self, source: "Source") -> "Binary":
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        major, minor = self.compute_capability
        # RoPE rounds every product: the contract.
        options = {
            "num_warps": source.shape.num_warps,
            "num_stages": source.shape.num_stages,
            "enable_fp_fusion": source.name != "rope_append",
        }
        try:
            tree = ASTSource(kernel_function(source.name), source.signature, source.constants, source.hints)
            kernel = compile(tree, target=GPUTarget("cuda", major * 10 + minor, WARP), options=options)
        except Exception as error:  # Triton's own types share no base but Exception
            raise BuildError(f"kernel {source.name} for {major}.{minor}: {error}") from error
        found = kernel.metadata
        return Binary(found.name, kernel.asm["cubin"], found.num_warps, found.shared)

    def _pointer_types(self, a: AttentionAttributes | None) -> dict[str, str]:
        activations = f"*{self.activations}"
        pool = {KvDtypeCode.FP8: "*u8", KvDtypeCode.FP16: "*fp16", KvDtypeCode.BF16: "*bf16"}
        types = dict.fromkeys(("qkv", "q", "q_out", "out"), activations)
        floats = ("cos", "sin", "q_weight", "k_weight", "partial", "logits", "temperature", "top_p", "min_p", "uniform")
        types |= dict.fromkeys(floats, "*fp32")
        integers = ("slots", "table", "kv_lens", "cu_query_lens", "tokens", "finite", "top_k", "sampled", "source",
                    "given", "input_ids", "positions")  # fmt: skip
        types |= dict.fromkeys(integers, "*i32")
        if a is not None:
            types["pool"] = pool[KvDtypeCode(a.kv_dtype)]
        return types

    def _check(self, name: str, usage: "ResourceUsage", shared_bytes: int) -> None:
        limit = SHARED_BYTES[self.compute_capability]
        if usage.spill_bytes:
            raise BuildError(f"kernel {name}: {usage.spill_bytes} bytes of registers are spilled; take a smaller shape")
        if shared_bytes > limit:
            raise BuildError(f"kernel {name}: {shared_bytes} bytes of shared memory, the GPU has {limit}")


@cache
def kernel_function(name: KernelName) -> Any:
    """The Triton function of that name."""
    from castline.plugins.tensorrt.kernels import decode, inputs, prefill, rope_append, sampling

    for module in (rope_append, decode, prefill, sampling, inputs):
        if hasattr(module, name):
            return getattr(module, name)
    raise BuildError(f"there is no kernel {name}")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    registers: int
    spill_bytes: int
    """Local memory beside the stack that the source asked for, which is none."""


def resource_usage(cubin: bytes) -> ResourceUsage:
    """What `cuobjdump -res-usage` of Triton's own toolchain says of a cubin. Raises BuildError."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"cannot read a kernel's resources with {tool}: {error}") from error
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    if "REG" not in found:
        raise BuildError(f"cuobjdump said nothing of registers: {done.stdout.strip()[:200]}")
    return ResourceUsage(int(found["REG"]), int(found.get("STACK", 0)) + int(found.get("LOCAL", 0)))


def kernel_set(compute_capability: tuple[int, int], compiled: list[Compiled]) -> KernelSet:
    import triton

    major, minor = compute_capability
    return KernelSet(f"{major}.{minor}", f"triton {triton.__version__}", tuple(one.spec for one in compiled))
