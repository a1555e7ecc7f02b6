"""A plan of a `FakeModel`: it launches what TensorRT and the plugin would, through the engine's own launcher.

It refuses what TensorRT refuses: shapes outside the profile, tensors that are unbound or not aligned, a pool that comes
out elsewhere than it went in, and a change to a context of fixed shapes after its first pass, for that would spoil the
graph that was captured from it.
"""

from dataclasses import dataclass, field

from castline.engines.errors import EngineError
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    INPUT_IDS,
    KV_LENS,
    LOGITS,
    LOGITS_INDICES,
    POSITIONS,
    SLOT_MAPPING,
    kv_pool_name,
    kv_pool_output_name,
)
from castline.plugins.tensorrt.driver import LaunchValue
from castline.plugins.tensorrt.engine import DECODE, PlanTensor
from castline.plugins.tensorrt.launcher import ALIGNMENT, Launch, Launcher, StepShape, workspace_bytes
from fake_cuda.driver import FakeDriver
from fake_cuda.hazards import DriverMisuse
from fake_cuda.kernels import HALF
from fake_cuda.model import FakeModel

PER_TOKEN = (INPUT_IDS, POSITIONS, SLOT_MAPPING)


@dataclass(frozen=True)
class PlanLimits:
    """Of the profiles."""

    tokens: int
    sequences: int
    table_width: int
    blocks: int


class FakePlan:
    """Implements `castline.plugins.tensorrt.engine.PlanEngine`."""

    def __init__(self, driver: FakeDriver, launcher: Launcher, model: FakeModel, limits: PlanLimits) -> None:
        self.driver, self.launcher, self.model, self.limits = driver, launcher, model, limits
        self.contexts: list[FakeContext] = []
        self.closed = self.is_kept = False
        tokens = [limits.tokens]
        shapes = {
            **dict.fromkeys((*PER_TOKEN, LOGITS_INDICES), tokens),
            CU_QUERY_LENS: [limits.sequences + 1],
            KV_LENS: [limits.sequences],
            BLOCK_TABLE: [limits.sequences, limits.table_width],
        }
        self.tensors = {name: PlanTensor(True, "int32", tuple(shape)) for name, shape in shapes.items()}
        self.tensors[LOGITS] = PlanTensor(False, "float", (-1, model.vocab_size))
        for layer in range(model.num_layers):
            pool = (limits.blocks, model.block_bytes)
            self.tensors[kv_pool_name(layer)] = PlanTensor(True, "int8", pool)
            self.tensors[kv_pool_output_name(layer)] = PlanTensor(False, "int8", pool)
        largest = StepShape(limits.tokens, limits.sequences, limits.table_width, limits.blocks)
        heads = model.num_heads + 2 * model.num_kv_heads
        self.qkv_bytes = _aligned(limits.tokens * heads * model.head_dim * HALF)
        self.out_bytes = _aligned(limits.tokens * model.num_heads * model.head_dim * HALF)
        workspace = workspace_bytes(launcher.kernels, model.attributes, largest, model.multiprocessors)
        self.scratch_bytes = self.qkv_bytes + self.out_bytes + workspace

    def create_context(self, profile: int, scratch: int, stream: int, *, fixed_shapes: bool) -> "FakeContext":
        self.driver.device.holding(scratch, self.scratch_bytes, "a context's memory")
        context = FakeContext(self, profile, scratch, fixed_shapes)
        self.contexts.append(context)
        return context

    def keep_compiled(self) -> None:
        """What TensorRT compiles is there when the contexts have run."""
        assert self.contexts
        assert all(context.passes for context in self.contexts if context.fixed_shapes)
        self.is_kept = True

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeContext:
    plan: FakePlan
    profile: int
    scratch: int
    fixed_shapes: bool
    addresses: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    passes: int = 0

    def bind(self, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
        if self.fixed_shapes and self.passes:
            raise DriverMisuse("a context is changed from which a graph was captured")
        tensor = self.plan.tensors.get(name)
        if tensor is None or tensor.is_input != (shape is not None):
            raise EngineError(f"the plan has no such tensor: {name} {shape}")
        if address % ALIGNMENT:
            raise DriverMisuse(f"{name} at {address:#x} is not aligned")
        self.addresses[name] = address
        if shape is not None:
            self._check_shape(name, shape, tensor.shape)
            self.shapes[name] = shape

    def enqueue(self, stream: int) -> None:
        self.passes += 1
        plan, model = self.plan, self.plan.model
        if plan.closed:
            raise DriverMisuse("a pass of a plan that was released")
        if missing := set(plan.tensors) - set(self.addresses):
            raise EngineError(f"not bound: {missing}")
        shape = self._step_shape()
        qkv, out = self.scratch, self.scratch + plan.qkv_bytes
        workspace = out + plan.out_bytes
        at = self.addresses
        self._launch("embed", shape.tokens, stream, at[INPUT_IDS], at[POSITIONS], qkv)
        for layer in range(model.num_layers):
            if layer:
                self._launch("mix", shape.tokens, stream, out, qkv)
            addresses = {
                "qkv": qkv,
                "out": out,
                "pool": at[kv_pool_name(layer)],
                "slots": at[SLOT_MAPPING],
                "cu_query_lens": at[CU_QUERY_LENS],
                "kv_lens": at[KV_LENS],
                "table": at[BLOCK_TABLE],
            }
            plan.launcher.attention(model.attributes, shape, addresses, workspace, stream)
        rows = self.shapes[LOGITS_INDICES][0]
        self._launch("head", rows, stream, out, at[LOGITS_INDICES], at[LOGITS], shape.tokens)

    def _check_shape(self, name: str, shape: tuple[int, ...], largest: tuple[int, ...]) -> None:
        limits = self.plan.limits
        if self.profile == DECODE and name in (*PER_TOKEN, LOGITS_INDICES):
            largest = (limits.sequences,)
        if len(shape) != len(largest) or not all(1 <= n <= most for n, most in zip(shape, largest, strict=True)):
            raise EngineError(f"profile {self.profile} does not take {name} of shape {shape}: at most {largest}")

    def _step_shape(self) -> StepShape:
        shapes, at = self.shapes, self.addresses
        tokens, sequences = shapes[INPUT_IDS][0], shapes[KV_LENS][0]
        if {shapes[name][0] for name in PER_TOKEN} != {tokens}:
            raise EngineError(f"shapes do not agree: {shapes}")
        if shapes[CU_QUERY_LENS] != (sequences + 1,) or shapes[BLOCK_TABLE][0] != sequences:
            raise EngineError(f"shapes do not agree: {shapes}")
        if self.profile == DECODE and tokens != sequences:
            raise EngineError(f"a decode of {tokens} tokens in {sequences} sequences")
        for layer in range(self.plan.model.num_layers):
            if at[kv_pool_name(layer)] != at[kv_pool_output_name(layer)]:
                raise DriverMisuse(f"the pool of layer {layer} comes out elsewhere than it went in")
        blocks = {shapes[kv_pool_name(layer)][0] for layer in range(self.plan.model.num_layers)}
        return StepShape(tokens, sequences, shapes[BLOCK_TABLE][1], blocks.pop())

    def _launch(self, name: str, programs: int, stream: int, *arguments: LaunchValue) -> None:
        kernel = next(one for one in self.plan.launcher.kernels.kernels if one.name == name)
        self.plan.launcher.launch(Launch(kernel, (programs, 1, 1), arguments), stream)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
