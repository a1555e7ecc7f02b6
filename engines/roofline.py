"""The speed that memory and arithmetic allow: an upper bound, at 100 % of bandwidth and of the dense peak.

A step takes at least as long as reading its bytes, and at least as long as its arithmetic, overlapped perfectly:

    seconds = max(bytes / bandwidth, layer FLOP / rate of the weights' type + attention and head FLOP / fp16 rate)

*Bytes* are the weights once, and K and V of every token that is attended to. A matmul of P parameters is 2·P FLOP a
token, attention 4·heads·head_dim FLOP for each pair of tokens and layer. Activations, sampling and launches count
nothing.
The model is Williams, Waterman and Patterson, "Roofline", 2009.
"""

from dataclasses import dataclass
from typing import Literal

from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype, ModelFacts
from castline.engines.precision import Parameters, WeightFormat, bytes_read
from castline.engines.sku import Sku


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks of a chip."""

    bytes: float
    layer_flops: float
    half_flops: float
    """At the fp16 rate: attention, and the head."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.layer_flops + other.layer_flops, self.half_flops + other.half_flops)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one kind of step; ``tokens_per_s`` over all sequences."""

    tokens_per_s: float
    seconds: float
    bound: Literal["memory", "compute"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model in a weight format and a KV dtype on a SKU."""

    model: ModelFacts
    parameters: Parameters
    form: WeightFormat
    kv_dtype: KvDtype
    sku: Sku

    def decode(self, batch: int, context: int) -> Estimate:
        """One token for each of *batch* sequences, each with *context* tokens in its KV blocks."""
        attended = sum(self._attended(context))
        work = self._weights() + self._tokens(batch, logits=batch, attended=batch * attended)
        kv = Work(batch * attended * self._kv_bytes(), 0, 0)
        return self._estimate(work + kv, batch)

    def prefill(self, tokens: int, chunk: int) -> Estimate:
        """One prompt of *tokens*, computed *chunk* tokens a step; the weights are read in every step."""
        total = self._tokens(tokens, logits=1, attended=sum(self._causal_pairs(tokens)))
        steps = -(-tokens // chunk)
        for step in range(steps):
            before = sum(self._attended(min(tokens, (step + 1) * chunk)))
            total += self._weights() + Work(before * self._kv_bytes(), 0, 0)
        return self._estimate(total, tokens)

    def _weights(self) -> Work:
        return Work(bytes_read(self.parameters, self.form), 0, 0)

    def _tokens(self, tokens: int, logits: int, attended: int) -> Work:
        """Arithmetic of *tokens* new tokens; *attended* counts (query, key) pairs over all layers."""
        heads = self.model.num_heads * self.model.head_dim
        half = 2 * self.parameters.head_matmul * logits + 4 * heads * attended
        return Work(0, 2 * self.parameters.layers * tokens, half)

    def _attended(self, context: int) -> list[int]:
        """Keys that a token after *context* others attends to, in each layer: a window bounds them."""
        windows = self.model.windows or (0,) * self.model.num_layers
        return [min(context, window) if window else context for window in windows]

    def _causal_pairs(self, tokens: int) -> list[int]:
        """(query, key) pairs of a whole prompt in each layer: a triangle, cut to a band where there is a window."""
        return [w * (w + 1) // 2 + (tokens - w) * w for w in self._attended(tokens)]

    def _kv_bytes(self) -> int:
        """K and V of one token in one layer."""
        return kv_block_bytes(self.model.num_kv_heads, self.model.head_dim, 1, self.kv_dtype)

    def _estimate(self, work: Work, tokens: int) -> Estimate:
        memory = work.bytes / self.sku.bytes_per_s
        compute = work.layer_flops / self.sku.flops_per_s(self.form.rate)
        compute += work.half_flops / self.sku.flops_per_s("bf16" if self.form.rate == "bf16" else "fp16")
        seconds = max(memory, compute)
        return Estimate(tokens / seconds, seconds, "memory" if memory >= compute else "compute")
