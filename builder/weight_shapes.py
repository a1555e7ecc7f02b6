"""Which of a checkpoint's tensors are multiplied in the layers, told by their names and shapes. Reads no weight."""

import re
from collections.abc import Mapping

from castline.engines.device_memory import LayerMatmul

Shapes = dict[str, tuple[int, ...]]
"""Of each tensor, by its name: a linear layer's weight is [outputs, inputs]."""

FREQUENCIES = ("inv_freq", "rope_freqs.weight")
"""Tables that some files carry, and no model learns."""
ATTENTION_INPUTS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "attn_q", "attn_k", "attn_v", "attn_qkv"}
)
"""Last part but one of the names of weights that an attention node's input comes from."""
QK_NORMS = frozenset({"q_norm", "k_norm", "attn_q_norm", "attn_k_norm"})
_LAYER = re.compile(r"(?:^|\.)(?:h|layers|blk|blocks)\.(\d+)\.")


def is_called(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def layer_matmuls(shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> tuple[LayerMatmul, ...]:
    """Of every layer, in the order of *shapes*. An unknown name in the last layer counts as behind its attention, where
    a weight is the larger."""
    found = []
    for name, shape in shapes.items():
        layer = _LAYER.search(name)
        if layer is None or len(shape) != 2 or not name.endswith(".weight"):
            continue
        part = name.split(".")[-2]
        outputs, inputs = shape
        is_behind = int(layer.group(1)) == num_layers - 1 and part not in ATTENTION_INPUTS
        found.append(LayerMatmul(inputs, outputs, is_behind))
    return tuple(found)


def qk_norm_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters of the norms of queries and keys, over each head or over all."""
    return sum(shape[0] for name, shape in shapes.items() if len(shape) == 1 and name.split(".")[-2:][0] in QK_NORMS)
