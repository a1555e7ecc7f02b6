"""Weights on GPUs: the format of each recipe, what it weighs, and the tensor-core rate it is multiplied at."""

from dataclasses import dataclass
from typing import Literal

from castline.engines.errors import EngineError
from castline.engines.manifest import ModelFacts

RateName = Literal["fp16", "bf16", "fp8", "int8", "fp4"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits of a stored weight, scales included. Embedding, head and norms keep 16 bits in every format."""

    name: str
    summary: str
    layer_bits: float
    rate: RateName
    """Of the layers' matmuls: weight-only formats are widened and multiplied in fp16."""


HALF_BITS = 16
INT4_BLOCKS = (128, 64, 32)
"""Weights along K that share a 16-bit scale, the first that divides K: TensorRT takes whole blocks only. A matmul that
none divides keeps 16 bits."""
INT4_BLOCK = INT4_BLOCKS[0]

GPU_WEIGHTS = {
    form.name: form
    for form in (
        WeightFormat("fp16", "16-bit floats", HALF_BITS, "fp16"),
        WeightFormat("bf16", "bfloat16, for models whose activations overflow fp16", HALF_BITS, "bf16"),
        WeightFormat("fp8", "e4m3 weights and activations in the layers", 8, "fp8"),
        WeightFormat("int4", "4-bit weights in the layers, fp16 activations", 4 + HALF_BITS / INT4_BLOCK, "fp16"),
    )
}


def gpu_weights(name: str) -> WeightFormat:
    """The format of that name. Raises EngineError listing the names there are."""
    try:
        return GPU_WEIGHTS[name]
    except KeyError:
        raise EngineError(f"recipe {name!r} is not for GPUs; choose {', '.join(GPU_WEIGHTS)}") from None


@dataclass(frozen=True, slots=True)
class Parameters:
    """A model's parameters by what a step does with them."""

    layers: int
    """Multiplied in the layers, their norms and biases included: those are a few thousandths."""
    embedding: int
    head: int
    """0 where the embedding serves as the head too."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head

    @property
    def head_matmul(self) -> int:
        """Multiplied for each row of logits."""
        return self.head or self.embedding

    @classmethod
    def of(cls, model: ModelFacts) -> "Parameters":
        """From what a manifest records."""
        table = model.vocab_size * model.hidden_size
        lookup = model.num_lookup_parameters
        head = table if lookup else 0
        embedding = lookup or table
        return cls(model.num_parameters - embedding - head, embedding, head)


def bytes_read(parameters: Parameters, form: WeightFormat) -> int:
    """Bytes of weights that a step reads whatever its size: all but an embedding that is only looked up."""
    return int(parameters.layers * form.layer_bits + parameters.head_matmul * HALF_BITS) // 8
