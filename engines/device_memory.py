"""What an engine for a GPU takes of it beside the KV pool: weights, TensorRT's scratch memory, the buffers of a step.

Pure arithmetic on the shapes of a model's weights, which headers tell. `castline plan` computes these figures before
there is an engine, and a build records them in its manifest, so that both give the pool as many blocks.
Sizes are in bytes, lengths in tokens.
"""

from dataclasses import dataclass

from castline.engines.capacity import blocks_for
from castline.engines.manifest import DeviceMemory, Limits
from castline.engines.precision import INT4_BLOCKS, Parameters, WeightFormat

HALF_BYTES = 2
FLOAT_BYTES = 4
INDEX_BYTES = 4
"""Of token ids, positions, slots, lengths and draw options."""
CONSTANT_BYTES = 4096
"""A graph's indices and scalars: hundreds of bytes."""
TABLE_BYTES = 8 << 20
"""Largest table of what depends on positions alone: larger ones are computed in every step."""
SLACK_BYTES = 96 << 20
"""A plan's kernels on the device (20 to 44 MB of the demo's plans, compressed, whatever the model's size) and what they
work in: split-K's partial sums, and the workspace that TensorRT's matmuls choose."""
BYTES_PER_OUTPUT = 5
"""Bytes of scratch for each output of a layer's matmuls and token: outputs and inputs of all of them at once in 16
bits, for a matmul's inputs are outputs of another or as many, and the inputs once more in e4m3. TensorRT uses most of
that memory several times."""
DRAW_OPTIONS = 5
"""Of a row that is drawn."""
INPUT_ARRAYS = 14
"""Of a step, each aligned to ALIGNMENT."""
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LayerMatmul:
    """A weight of the layers that is multiplied, as the checkpoint has it."""

    inputs: int
    outputs: int
    is_behind: bool = False
    """Behind the last layer's attention, where fp8 keeps 16 bits."""


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """All that decides an engine's weights and scratch memory but its format and its limits."""

    parameters: Parameters
    vocab_size: int
    num_layers: int
    matmuls: tuple[LayerMatmul, ...]
    qk_norms: int = 0
    """Parameters of QK norms inside attention nodes, which take them as float32."""
    tables: tuple[int, ...] = ()
    """Width of each table that is looked up by position: RoPE's cosines and sines."""
    caps_logits: bool = False
    """Through float32, behind the head."""


def device_memory(shapes: WeightShapes, form: WeightFormat, built: Limits) -> DeviceMemory:
    """Upper bounds, for an engine built with the limits *built*."""
    return DeviceMemory(held_bytes(shapes, form, built.max_model_len), scratch_bytes(shapes, form, built))


def held_bytes(shapes: WeightShapes, form: WeightFormat, max_model_len: int) -> int:
    """Weights on the device: exact to CONSTANT_BYTES, but for fp8, where weights decide which matmuls need a power of
    two for each channel (`castline.builder.tensorrt.weights`): all are counted."""
    matmuls = sum(matmul.inputs * matmul.outputs for matmul in shapes.matmuls)
    others = shapes.parameters.total - matmuls + shapes.qk_norms
    rows = [FLOAT_BYTES * width * max_model_len for width in shapes.tables]
    tables = sum(size for size in rows if size <= TABLE_BYTES)
    return HALF_BYTES * others + sum(matmul_bytes(one, form) for one in shapes.matmuls) + tables + CONSTANT_BYTES


def matmul_bytes(matmul: LayerMatmul, form: WeightFormat) -> int:
    """Of one weight, scales included."""
    elements = matmul.inputs * matmul.outputs
    if form.name == "fp8" and not matmul.is_behind:
        return elements + HALF_BYTES * (matmul.outputs + 2)  # channels; the weight's scale and its input's
    block = next((size for size in INT4_BLOCKS if matmul.inputs % size == 0), None) if form.name == "int4" else None
    return HALF_BYTES * elements if block is None else elements // 2 + HALF_BYTES * (elements // block)


def scratch_bytes(shapes: WeightShapes, form: WeightFormat, built: Limits) -> int:
    """Bound of what TensorRT works in: the largest step of any profile, with logits of every token.

    The layers' tensors and the head's are not needed at once: that both are counted is the margin, with SLACK_BYTES.
    """
    tokens = built.max_num_batched_tokens
    outputs = -(-sum(matmul.outputs for matmul in shapes.matmuls) // shapes.num_layers)
    logits = shapes.vocab_size * (HALF_BYTES + (FLOAT_BYTES if shapes.caps_logits else 0))
    layer = sum(matmul.inputs * matmul.outputs for matmul in shapes.matmuls) // shapes.num_layers
    widened = HALF_BYTES * layer if form.name == "int4" else 0  # where no kernel multiplies codes as they are
    return tokens * (BYTES_PER_OUTPUT * outputs + logits) + widened + SLACK_BYTES


def buffer_bytes(vocab_size: int, limits: Limits) -> int:
    """Bound of the executor's own buffers: a step's inputs, float32 logits of every token, drawn tokens with flags."""
    tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
    table = sequences * blocks_for(limits.max_model_len, limits.block_size)
    rows = 3 * tokens + DRAW_OPTIONS * tokens + tokens
    inputs = INDEX_BYTES * (rows + 4 * sequences + 1 + table) + INPUT_ARRAYS * ALIGNMENT
    return tokens * (FLOAT_BYTES * vocab_size + 2 * INDEX_BYTES) + inputs
