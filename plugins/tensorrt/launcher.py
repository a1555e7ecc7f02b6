"""Which kernels an attention node launches, on which grids, with which arguments; and the launching itself.

`attention_launches` is a pure function of shapes and addresses. `Launcher` has the kernels loaded on a device; it
allocates nothing and waits for nothing in a launch, so that a launch can be captured in a CUDA graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from castline.engines.errors import EngineError
from castline.plugins.contract import AttentionAttributes
from castline.plugins.tensorrt.driver import Driver, LaunchValue
from castline.plugins.tensorrt.kernel_set import KernelName, KernelSet, KernelSpec, attributes_key

ALIGNMENT: Final = 256
"""Of each part of the workspace, in bytes."""
WAVES: Final = 2
"""Programs that a decode should have for each multiprocessor: split-K makes them where sequences and heads are few."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of one step, as the node's inputs have them."""

    tokens: int
    sequences: int
    table_width: int
    num_blocks: int

    @property
    def is_decode(self) -> bool:
        """One new token a sequence: every sequence of a step has at least one."""
        return self.tokens == self.sequences


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its grid and its arguments in launch order."""

    kernel: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[LaunchValue, ...]


def split_count(kernels: KernelSet, a: AttentionAttributes, shape: StepShape, multiprocessors: int) -> int:
    """Parts that a decode's keys are cut into: enough programs to fill the GPU, and no part without a tile of keys.

    The host does not know how long sequences are: the block table's width bounds them. ``kv_split`` of the node, keys
    a part, overrides what would fill the GPU.
    """
    keys = shape.table_width * a.block_size
    keys = min(keys, a.window) if a.window else keys
    split = kernels.find("decode_split", attributes_key(a))
    most = min(_fixed(kernels.find("decode_merge", attributes_key(a)), "max_splits"), -(-keys // _fixed(split, "tile")))
    wanted = -(-keys // a.kv_split) if a.kv_split else WAVES * multiprocessors // (shape.sequences * a.num_kv_heads)
    return max(1, min(wanted, most))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the node's intermediate tensors lie in its workspace, in bytes from its start."""

    partial: int
    total: int

    @classmethod
    def of(cls, kernels: KernelSet, a: AttentionAttributes, shape: StepShape, splits: int) -> "Workspace":
        """Rotated queries [T, heads * dim] of 16-bit floats, then split-K's partial sums."""
        padded = _fixed(kernels.find("decode_merge", attributes_key(a)), "padded")
        queries = _aligned(shape.tokens * a.num_heads * a.head_dim * 2)
        partial = shape.sequences * a.num_heads * splits * (padded + 2) * 4 if splits > 1 else 0
        return cls(queries, queries + _aligned(partial))


def workspace_bytes(kernels: KernelSet, a: AttentionAttributes, largest: StepShape, multiprocessors: int) -> int:
    """What every step up to *largest* fits in. A small batch is cut into more parts, and may need the most."""
    needed = 0
    for sequences in range(1, largest.sequences + 1):
        shape = StepShape(largest.tokens, sequences, largest.table_width, largest.num_blocks)
        splits = split_count(kernels, a, shape, multiprocessors)
        needed = max(needed, Workspace.of(kernels, a, shape, splits).total)
    return needed


def attention_launches(
    kernels: KernelSet,
    a: AttentionAttributes,
    shape: StepShape,
    addresses: Mapping[str, int],
    workspace: int,
    multiprocessors: int,
) -> list[Launch]:
    """The launches of one node, in order on one stream.

    *addresses* has those of ``qkv``, ``pool``, ``slots``, ``cu_query_lens``, ``kv_lens``, ``table`` and ``out``, and of
    ``cos``, ``sin``, ``q_weight``, ``k_weight`` where the node has them; *workspace* is that of
    `workspace_bytes` bytes. Kernels of one kind of sequence skip those of the other, so a mixed step launches decode
    and prefill.
    """
    if not shape.tokens or not shape.sequences:
        return []
    splits = split_count(kernels, a, shape, multiprocessors)
    rotated = workspace
    values: dict[str, LaunchValue] = {
        **dict.fromkeys(("cos", "sin", "q_weight", "k_weight"), 0),
        **addresses,
        "q_out": rotated,
        "q": rotated,
        "partial": workspace + Workspace.of(kernels, a, shape, splits).partial,
        "num_blocks": shape.num_blocks,
        "num_sequences": shape.sequences,
        "table_width": shape.table_width,
        "num_splits": splits,
    }
    key = attributes_key(a)

    def launch(name: KernelName, *grid: int) -> Launch:
        kernel = kernels.find(name, key)
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(kernel, (x, y, z), _arguments(kernel, values))

    found = [launch("rope_append", shape.tokens, a.num_heads + 2 * a.num_kv_heads)]
    if not shape.is_decode:
        queries = _fixed(kernels.find("prefill", key), "queries")
        found.append(launch("prefill", shape.tokens // queries + shape.sequences, a.num_kv_heads))
    if splits == 1:
        found.append(launch("decode", shape.sequences, a.num_kv_heads))
    else:
        found.append(launch("decode_split", shape.sequences, a.num_kv_heads, splits))
        found.append(launch("decode_merge", shape.sequences, a.num_heads))
    return found


class Launcher:
    """The kernels of one engine, loaded. The caller closes it before the driver."""

    def __init__(self, directory: Path, kernels: KernelSet, driver: Driver, multiprocessors: int) -> None:
        """Loads every cubin of *directory*. Raises EngineError."""
        self.kernels = kernels
        self.multiprocessors = multiprocessors
        self._driver = driver
        self._modules: list[int] = []
        self._functions: dict[str, int] = {}
        """By cubin."""
        try:
            for kernel in kernels.kernels:
                self._load(directory, kernel)
        except BaseException:
            self.close()
            raise

    def attention(
        self, a: AttentionAttributes, shape: StepShape, addresses: Mapping[str, int], workspace: int, stream: int
    ) -> None:
        """Queues the launches of one node on *stream*."""
        for one in attention_launches(self.kernels, a, shape, addresses, workspace, self.multiprocessors):
            self.launch(one, stream)

    def launch(self, launch: Launch, stream: int) -> None:
        kernel = launch.kernel
        typed = [(argument.type, value) for argument, value in zip(kernel.arguments, launch.arguments, strict=True)]
        self._driver.launch(
            self._functions[kernel.cubin], launch.grid, kernel.threads, kernel.shared_bytes, stream, typed
        )

    def close(self) -> None:
        for module in self._modules:
            self._driver.unload_module(module)
        self._modules.clear()
        self._functions.clear()

    def _load(self, directory: Path, kernel: KernelSpec) -> None:
        try:
            cubin = (directory / kernel.cubin).read_bytes()
        except OSError as error:
            raise EngineError(
                f"cannot read {directory / kernel.cubin} ({error.strerror}); rebuild the engine"
            ) from None
        module = self._driver.load_module(cubin)
        self._modules.append(module)
        self._functions[kernel.cubin] = self._driver.function(module, kernel.entry, kernel.shared_bytes)


def _arguments(kernel: KernelSpec, values: Mapping[str, LaunchValue]) -> tuple[LaunchValue, ...]:
    unknown = [argument.name for argument in kernel.arguments if argument.name not in values]
    if unknown:
        raise EngineError(
            f"kernel {kernel.name} takes {', '.join(unknown)}, which this castline does not give it; rebuild the engine"
        )
    for argument in kernel.arguments:
        if argument.type == "pointer" and int(values[argument.name]) % argument.alignment:
            raise EngineError(
                f"kernel {kernel.name}: {argument.name} is at address {int(values[argument.name]):#x}, which is not a "
                f"multiple of {argument.alignment}; allocate it by itself, or align its offset"
            )
    return tuple(values[argument.name] for argument in kernel.arguments)


def _fixed(kernel: KernelSpec, name: str) -> int:
    """A constant the kernel was compiled with."""
    value = kernel.constants.get(name)
    if not isinstance(value, int):
        raise EngineError(f"kernel {kernel.name} has no constant {name}; rebuild the engine")
    return value


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
