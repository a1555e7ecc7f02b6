"""How far each kernel of an engine reaches from its pointers, from its grid, its numbers and what it was compiled for.

What depends on the contents of memory (a token's row, a block's place) is checked by `fake_cuda.stand_ins`, when the
kernel is executed; here are the bytes that every launch touches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from castline.plugins.tensorrt.kernel_set import KernelSpec
from fake_cuda.hazards import DriverMisuse

HALF, WORD = 2, 4
"""Bytes of an activation, and of a float32 or an int32."""
PER_HEAD, FULL = 1, 2


@dataclass(frozen=True, slots=True)
class Reach:
    num_bytes: int
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One launch."""

    kernel: KernelSpec
    grid: tuple[int, int, int]
    values: Mapping[str, Any]
    """Arguments by name."""

    def __getattr__(self, name: str) -> Any:
        """An argument or a constant."""
        constants = self.kernel.constants
        return self.values[name] if name in self.values else constants[name]

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise DriverMisuse(f"kernel {self.kernel.name}: {what} (grid {self.grid}, arguments {dict(self.values)})")

    @property
    def pool_element(self) -> int:
        return HALF if self.kind == 0 else 1

    @property
    def pool_bytes(self) -> int:
        return int(self.num_blocks) * 2 * self.kv_heads * self.block_size * self.dim * self.pool_element


Reaches = dict[str, Reach]


def _written(num_bytes: int) -> Reach:
    return Reach(num_bytes, writes=True)


def rope_append(c: Call) -> Reaches:
    tokens = c.grid[0]
    c.expect(c.grid[1:] == (c.heads + 2 * c.kv_heads, 1), "one program a token and head of Q, K and V")
    angles = tokens * (c.rotary // 2) * WORD
    weights = {0: (0, 0), PER_HEAD: (c.dim, c.dim), FULL: (c.heads * c.dim, c.kv_heads * c.dim)}[c.norm]
    return {
        "qkv": Reach(tokens * (c.heads + 2 * c.kv_heads) * c.dim * HALF),
        "cos": Reach(angles),
        "sin": Reach(angles),
        "q_weight": Reach(weights[0] * WORD),
        "k_weight": Reach(weights[1] * WORD),
        "pool": _written(c.pool_bytes),
        "slots": Reach(tokens * WORD),
        "q_out": _written(tokens * c.heads * c.dim * HALF),
    }


def _paged(c: Call, sequences: int, tokens: int) -> Reaches:
    c.expect(c.table_width >= 1, "a table has a block a row at least")
    return {
        "q": Reach(tokens * c.heads * c.dim * HALF),
        "pool": Reach(c.pool_bytes),
        "table": Reach(sequences * c.table_width * WORD),
        "kv_lens": Reach(sequences * WORD),
        "cu_query_lens": Reach((sequences + 1) * WORD),
    }


def decode(c: Call) -> Reaches:
    sequences = c.grid[0]
    c.expect(c.grid[1:] == (c.kv_heads, 1), "one program a sequence and KV head")
    return {**_paged(c, sequences, sequences), "out": _written(sequences * c.heads * c.dim * HALF)}


def _partial(c: Call, sequences: int) -> int:
    return sequences * c.heads * int(c.num_splits) * (c.padded + 2) * WORD


def decode_split(c: Call) -> Reaches:
    sequences = c.grid[0]
    c.expect(c.grid[1:] == (c.kv_heads, c.num_splits), "one program a sequence, KV head and part")
    return {**_paged(c, sequences, sequences), "partial": _written(_partial(c, sequences))}


def decode_merge(c: Call) -> Reaches:
    sequences = c.grid[0]
    c.expect(c.grid[1:] == (c.heads, 1), "one program a sequence and head")
    c.expect(1 <= c.num_splits <= c.max_splits, "more parts than it joins")
    return {
        "partial": Reach(_partial(c, sequences)),
        "cu_query_lens": Reach((sequences + 1) * WORD),
        "out": _written(sequences * c.heads * c.dim * HALF),
    }


def prefill(c: Call) -> Reaches:
    sequences = c.num_sequences
    tokens = max(sequences, (c.grid[0] - sequences) * c.queries)
    c.expect(c.grid[0] >= sequences >= 1, "a tile a sequence at least")
    c.expect(c.grid[1:] == (c.kv_heads, 1), "one program a tile and KV head")
    return {**_paged(c, sequences, tokens), "out": _written(tokens * c.heads * c.dim * HALF)}


def greedy(c: Call) -> Reaches:
    rows = c.grid[0]
    return {"logits": Reach(rows * c.vocab * WORD), "tokens": _written(rows * WORD), "finite": _written(rows * WORD)}


def sample(c: Call) -> Reaches:
    options = ("temperature", "top_k", "top_p", "min_p", "uniform")
    return {**greedy(c), **dict.fromkeys(options, Reach(c.grid[0] * WORD))}


def gather_inputs(c: Call) -> Reaches:
    rows = c.batch * WORD
    c.expect((c.grid[0] - 1) * c.width < c.batch <= c.grid[0] * c.width, "a program for each of its rows")
    return {
        "sampled": Reach(WORD),
        "source": Reach(rows),
        "given": Reach(rows),
        "table": Reach(c.batch * c.table_width * WORD),
        "kv_lens": Reach(rows, writes=True),
        **dict.fromkeys(("input_ids", "positions", "slots"), _written(rows)),
    }


REACHES: dict[str, Callable[[Call], Reaches]] = {
    "rope_append": rope_append,
    "decode": decode,
    "decode_split": decode_split,
    "decode_merge": decode_merge,
    "prefill": prefill,
    "greedy": greedy,
    "sample": sample,
    "gather_inputs": gather_inputs,
}
