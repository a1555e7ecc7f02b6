"""Steps on an NVIDIA GPU: implements `castline.runtime.device_executor.DeviceExecutor`.

Everything is queued on one stream, in the order of submission, so that buffers on the device need no guard: one copy
brings a step's arrays, one graph (a decode) or one pass of the plan (a mixed step) computes, one kernel draws, and a
few copies bring tokens and logits back. Only memory of the host is written and read while the device works: it has one
slot for each step in flight, and an event tells when a step's results are there.

Nothing is allocated after the constructor.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from castline.engines.capacity import blocks_for
from castline.engines.device_memory import buffer_bytes
from castline.engines.errors import EngineError
from castline.engines.manifest import Limits, Manifest
from castline.engines.memory_plan import EngineMemory
from castline.engines.sku import load_sku
from castline.engines.user_cache import user_cache
from castline.plugins.tensorrt.driver import Driver
from castline.plugins.tensorrt.engine import MIXED, PlanEngine
from castline.plugins.tensorrt.flavour import load_flavour
from castline.plugins.tensorrt.kernel_set import KERNELS_DIRECTORY, read_kernel_set
from castline.plugins.tensorrt.launcher import Launcher
from castline.plugins.tensorrt.plan_engine import TensorRtPlan
from castline.plugins.tensorrt.plugin import PluginHost
from castline.runtime.client import EffectiveLimits
from castline.runtime.device_executor import MAX_IN_FLIGHT, DeviceStep, StepOutput
from castline.runtime.tensorrt.bindings import Bindings, pool_shapes, vocabulary
from castline.runtime.tensorrt.decode_graphs import DecodeGraphs, decode_layout, decode_sizes
from castline.runtime.tensorrt.device_memory import DeviceMemory
from castline.runtime.tensorrt.device_sampler import DeviceSampler, pack_draws
from castline.runtime.tensorrt.step_inputs import (
    NO_SEQUENCES,
    InputLayout,
    Packed,
    StepSizes,
    pack_decode,
    pack_mixed,
)
from castline.runtime.tensorrt.step_outputs import PendingOutput, StepOutputs
from castline.runtime.tensorrt.step_rows import StepRows, decode_rows, mixed_rows


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What buffers must hold."""

    tokens: int
    sequences: int
    table_width: int

    @classmethod
    def of(cls, limits: EffectiveLimits) -> "LargestStep":
        tokens = limits.max_num_batched_tokens
        width = blocks_for(limits.max_model_len, limits.block_size)
        return cls(tokens, min(tokens, limits.max_num_seqs), width)

    @property
    def layouts(self) -> list[InputLayout]:
        """Those that take the most bytes: of a mixed step, and of a decode."""
        mixed = StepSizes(self.tokens, self.sequences, self.table_width, rows=self.tokens, drawn=self.tokens)
        return [InputLayout.of(mixed), decode_layout(self.sequences, self.table_width)]


class TensorRtExecutor:
    """Not thread-safe: one loop owns it, in the thread that the driver's context is current in."""

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        engine: PlanEngine,
        limits: EffectiveLimits,
        num_layers: int,
        planned_scratch: int,
    ) -> None:
        """Allocates everything and captures the decodes; *planned_scratch* is the manifest's bound of the plan's own
        memory. It owns *driver*, *launcher* and *engine* from then on, but not where this raises EngineError."""
        self.vocab_size = vocabulary(engine)
        self._driver, self._launcher, self._engine, self._limits = driver, launcher, engine, limits
        self._largest = largest = LargestStep.of(limits)
        self._memory = memory = DeviceMemory(driver)
        self._pending: deque[PendingOutput] = deque()
        self._submitted = 0
        """Tickets given out."""
        self._last_drawn: NDArray[np.int64] | None = None
        """Rows that the last step's draws were from."""
        self._pool_shapes = pool_shapes(engine, num_layers, limits.num_blocks)
        pool_bytes = sum(blocks * block_bytes for blocks, block_bytes in self._pool_shapes)
        buffers = buffer_bytes(
            self.vocab_size,
            Limits(limits.max_model_len, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens),
        )
        memory.require_room(engine.scratch_bytes, planned_scratch, pool_bytes, buffers, limits.num_blocks)
        self._stream = memory.create_stream()
        self._graphs = DecodeGraphs(driver, self._stream)
        try:
            self._input_bytes = max(layout.total for layout in largest.layouts)
            self._inputs = memory.allocate("a step's inputs", self._input_bytes)
            self._pinned = [memory.allocate_pinned("inputs", self._input_bytes) for _ in range(MAX_IN_FLIGHT)]
            self._outputs = StepOutputs(driver, memory, largest.tokens, largest.sequences, self.vocab_size)
            self._pools = self._allocate_pools()
            scratch = memory.allocate("activations", max(1, engine.scratch_bytes))
            self._sampler = DeviceSampler(launcher, self._outputs.logits, self._outputs.results, self._inputs)
            self._bindings = Bindings(self._inputs, self._outputs.logits, self._pools, self._pool_shapes)
            self._mixed = engine.create_context(MIXED, scratch, self._stream, fixed_shapes=False)
            self._bindings.bind_fixed(self._mixed)
            self._capture_decodes(scratch)
        except BaseException:
            self._release()
            raise

    @classmethod
    def load(cls, bundle: Path, manifest: Manifest, limits: EffectiveLimits, driver: Driver) -> "TensorRtExecutor":
        """The engine of a bundle that was checked against this host. It owns *driver*, even where it raises
        EngineError."""
        with ExitStack() as made:
            made.callback(driver.close)
            gpu, target = manifest.host.gpu, manifest.host.target
            if gpu is None or target == "cpu":
                raise EngineError(f"{bundle} was built for {target}, and not for a GPU")
            kernels = read_kernel_set(bundle / KERNELS_DIRECTORY)
            multiprocessors = load_sku(gpu.sku).sm_count  # as the plan's own workspace was sized for
            launcher = Launcher(bundle / KERNELS_DIRECTORY, kernels, driver, multiprocessors)
            made.callback(launcher.close)
            host = PluginHost(kernels, multiprocessors, launcher)
            compiled = _compiled_file(manifest, gpu.sku)
            plan = TensorRtPlan(load_flavour(target), bundle / manifest.graph_file, host, compiled)
            made.callback(plan.close)
            planned = EngineMemory.of(manifest).scratch_bytes
            assert planned is not None, "an engine for a GPU"
            executor = cls(driver, launcher, plan, limits, manifest.model.num_layers, planned)
            plan.keep_compiled()
            made.pop_all()
        return executor

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            assert 0 <= min(source, target) <= max(source, target) < self._limits.num_blocks, (source, target)
            for pool, (_, size) in zip(self._pools, self._pool_shapes, strict=True):
                self._driver.copy_on_device(pool + target * size, pool + source * size, size, self._stream)

    def submit(self, step: DeviceStep) -> int:
        """As the contract says; it waits for the device only where more logits are wanted than pinned memory holds
        (`castline.runtime.tensorrt.step_outputs.PINNED_LOGITS_BYTES`)."""
        assert len(self._pending) < MAX_IN_FLIGHT, "a step must be collected before another is submitted"
        ticket = self._submitted
        try:
            rows = self._queue(ticket, step)
            output = self._outputs.queue(ticket, rows, self._stream)
        except BaseException:
            self._last_drawn = None
            with suppress(EngineError):  # the slots of this ticket are used again by the next
                self._driver.synchronize(self._stream)
            raise
        self._last_drawn = rows.drawn
        self._pending.append(output)
        self._submitted += 1
        return ticket

    def collect(self, ticket: int) -> StepOutput:
        assert self._pending, "no step is in flight"
        assert ticket == self._submitted - len(self._pending), f"ticket {ticket} is out of order"
        output = self._pending.popleft()
        self._driver.synchronize_event(output.event)
        return output.read()

    def close(self) -> None:
        """The device is released whatever fails; raises the last EngineError."""
        with ExitStack() as closing:
            closing.callback(self._driver.close)
            closing.callback(self._launcher.close)
            closing.callback(self._release)

    # A step

    def _queue(self, ticket: int, step: DeviceStep) -> StepRows:
        """Packs and queues everything up to the draw."""
        tensors, stream = step.tensors, self._stream
        count = len(tensors.kv_lens)
        memory = self._pinned[ticket % MAX_IN_FLIGHT]
        is_decode = len(tensors.input_ids) == count
        if is_decode:
            assert (tensors.cu_query_lens == np.arange(count + 1)).all(), "a sequence of a step has no token"
            rows, graph = decode_rows(step), self._graphs.fitting(count)
            layout = graph.layout
        else:
            assert step.continues is None, "only steps of one token a sequence continue the step before"
            rows = mixed_rows(step, self._largest.tokens)
            layout = self._mixed_layout(step, rows)
        packed = layout.views(memory)
        if is_decode:
            pack_decode(packed, tensors, layout.sizes, self._source(step))
        else:
            pack_mixed(packed, tensors, rows.tokens)
        greedy = self._pack_draws(packed, step, rows)
        self._driver.copy_to_device(self._inputs, memory[: layout.used_bytes(count)], stream)
        if step.continues is not None:
            self._sampler.gather(layout, stream)
        if is_decode:
            self._graphs.launch(graph)
        else:
            self._bindings.bind_step(self._mixed, layout)
            self._mixed.enqueue(stream)
        if rows.num_drawn:
            self._sampler.draw(layout, rows.num_drawn, greedy, stream)
        return rows

    def _mixed_layout(self, step: DeviceStep, rows: StepRows) -> InputLayout:
        count, width = step.tensors.block_table.shape
        tokens = len(step.tensors.input_ids)
        assert tokens <= self._largest.tokens, f"a step of {tokens} tokens is over max_num_batched_tokens"
        assert count <= self._largest.sequences, f"a step of {count} sequences is over max_num_seqs"
        assert width <= self._largest.table_width, f"a table of {width} blocks is over max_model_len"
        drawn = 0 if _all_greedy(step) else rows.num_drawn
        return InputLayout.of(StepSizes(tokens, count, width, rows=len(rows.tokens), drawn=drawn))

    def _source(self, step: DeviceStep) -> NDArray[np.int32] | None:
        """For each sequence, the row that its token was drawn from in the step before, or -1."""
        continues = step.continues
        if continues is None:
            return None
        assert (step.tensors.slot_mapping >= 0).all(), "a step that continues another appends all of its tokens"
        if not (continues >= 0).any():
            return np.full(len(continues), -1, np.int32)
        assert self._last_drawn is not None, "the step before drew nothing"
        return np.where(continues >= 0, self._last_drawn[np.maximum(continues, 0)], -1).astype(np.int32)

    def _pack_draws(self, packed: Packed, step: DeviceStep, rows: StepRows) -> bool:
        """Whether the step takes the best token everywhere, and has no use for options."""
        if _all_greedy(step):
            return True
        pack_draws(packed, step.draws, rows.drawn, self.vocab_size)
        return False

    # Start and end

    def _allocate_pools(self) -> tuple[int, ...]:
        """Zeroed: what a kernel reads and ignores is a number."""
        pools = []
        for layer, (num_blocks, block_bytes) in enumerate(self._pool_shapes):
            pool = self._memory.allocate(f"the KV pool of layer {layer}", num_blocks * block_bytes)
            self._driver.fill(pool, 0, num_blocks * block_bytes, self._stream)
            pools.append(pool)
        return tuple(pools)

    def _capture_decodes(self, scratch: int) -> None:
        """On sequences of length 0, so that nothing is read from a pool or written to one."""
        for size in decode_sizes(self._largest.sequences):
            layout = decode_layout(size, self._largest.table_width)
            memory = self._pinned[0]  # the capture before has waited for its copy
            pack_decode(layout.views(memory), NO_SEQUENCES, layout.sizes, source=None)
            self._driver.copy_to_device(self._inputs, memory[: layout.used_bytes(0)], self._stream)
            self._graphs.capture(self._engine, self._bindings, layout, scratch)

    def _release(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._memory.close)
            closing.callback(self._engine.close)
            closing.callback(self._graphs.close)
            with suppress(EngineError):
                self._driver.synchronize(self._stream)


def _compiled_file(manifest: Manifest, sku: str) -> Path | None:
    """Where the kernels that TensorRT for RTX compiles at start-up are kept: one file an engine, as far as a plan is
    known by what it was built from."""
    home, target = user_cache(), manifest.host.target
    if home is None or not manifest.inputs_sha256:
        return None
    return home / f"{target}-{manifest.tool_versions.get(target, '')}-{sku}-{manifest.inputs_sha256[:16]}.runtime"


def _all_greedy(step: DeviceStep) -> bool:
    return not step.draws["temperature"].any()
