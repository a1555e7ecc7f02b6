"""The tensors of a plan bound to an engine's buffers."""

from dataclasses import dataclass

from castline.engines.errors import EngineError
from castline.plugins.contract import LOGITS, kv_pool_name, kv_pool_output_name
from castline.plugins.tensorrt.engine import PlanContext, PlanEngine
from castline.runtime.tensorrt.step_inputs import InputLayout


@dataclass(frozen=True, slots=True)
class Bindings:
    """Device addresses."""

    inputs: int
    """Where a step's layout begins."""
    logits: int
    pools: tuple[int, ...]
    """Of each layer."""
    pool_shapes: tuple[tuple[int, int], ...]
    """[num_blocks, block_bytes] of each layer."""

    def bind_fixed(self, context: PlanContext) -> None:
        """What is the same in every step. A pool goes in and comes out at one address."""
        context.bind(LOGITS, self.logits)
        for layer, (pool, shape) in enumerate(zip(self.pools, self.pool_shapes, strict=True)):
            context.bind(kv_pool_name(layer), pool, shape)
            context.bind(kv_pool_output_name(layer), pool)

    def bind_step(self, context: PlanContext, layout: InputLayout) -> None:
        for name, shape in layout.shapes.items():
            context.bind(name, self.inputs + layout.offsets[name], shape)


def pool_shapes(engine: PlanEngine, num_layers: int, num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Of each layer's pool. Raises EngineError where the plan has other layers, or takes fewer blocks."""
    shapes = []
    for layer in range(num_layers):
        tensor = engine.tensors.get(kv_pool_name(layer))
        if tensor is None:
            raise EngineError(f"the plan has no {kv_pool_name(layer)}, and engine.json says {num_layers} layers")
        most, block_bytes = tensor.shape
        if num_blocks > most:
            raise EngineError(f"a pool of {num_blocks} KV blocks is over the plan's {most}: give --kv-blocks {most}")
        shapes.append((num_blocks, block_bytes))
    return tuple(shapes)


def vocabulary(engine: PlanEngine) -> int:
    """Logits of a row. Raises EngineError for a plan that is not castline's."""
    logits = engine.tensors.get(LOGITS)
    if logits is None or logits.is_input or logits.dtype != "float" or len(logits.shape) != 2:
        raise EngineError(f"the plan has no output {LOGITS} of float32 rows; rebuild the engine")
    return logits.shape[1]
