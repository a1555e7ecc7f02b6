"""What the kernels of an engine do here: the same bookkeeping in NumPy, on numbers that stand for vectors.

A token's vector is one 32-bit number, its **tag**, in the first bytes of its row. Appending keeps the tag of K in the
token's slot of the pool; attention adds up the tags of a sequence's keys, found through the block table, each weighed
by its position. So a tag depends on every token before it, through everything that an executor keeps in order: a slot,
a length, a block or a token that is wrong changes the logits.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.cpu.sampling import CHOICE, NO_TOKEN
from castline.runtime.draw import draw_rows
from fake_cuda.kernels import HALF, WORD, Call
from fake_cuda.memory import DeviceMemory

Tags = NDArray[np.uint32]


def attend(query: Tags, keys: Tags) -> Tags:
    """Tags of a sequence's last tokens, *query*, over the tags of all of its keys."""
    weights = np.arange(1, 2 * len(keys), 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
    sums = np.cumsum(keys * weights, dtype=np.uint32)
    return sums[len(keys) - len(query) :] + query * np.uint32(31)


class Rows:
    """Tags of rows of *row_bytes* in device memory."""

    def __init__(self, device: DeviceMemory, address: int, count: int, row_bytes: int, what: str) -> None:
        self._rows = device.view(address, count * row_bytes, what).reshape(count, row_bytes)

    def read(self) -> Tags:
        tags: Tags = np.ascontiguousarray(self._rows[:, :WORD]).view(np.uint32)[:, 0]
        return tags

    def write(self, tags: Tags) -> None:
        self._rows[:, :WORD] = np.ascontiguousarray(tags, np.uint32).view(np.uint8).reshape(-1, WORD)


def integers(device: DeviceMemory, address: int, count: int) -> NDArray[np.int32]:
    return device.view(address, count * WORD).view(np.int32)


def floats(device: DeviceMemory, address: int, *shape: int) -> NDArray[np.float32]:
    return device.view(address, int(np.prod(shape)) * WORD).view(np.float32).reshape(shape)


def pool_tags(device: DeviceMemory, c: Call) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """The pool's K of the first head, [num_blocks, block_size, WORD] bytes."""
    blocks = device.view(c.pool, c.pool_bytes).reshape(c.num_blocks, -1)
    keys = blocks[:, : c.block_size * c.dim * c.pool_element].reshape(c.num_blocks, c.block_size, -1)
    return blocks, keys[:, :, :WORD]


def rope_append(device: DeviceMemory, c: Call) -> None:
    tokens = c.grid[0]
    tags = Rows(device, c.qkv, tokens, (c.heads + 2 * c.kv_heads) * c.dim * HALF, "qkv").read()
    slots = integers(device, c.slots, tokens)
    kept = slots >= 0
    c.expect((slots[kept] < c.num_blocks * c.block_size).all(), f"slots {slots.tolist()} are beyond the pool")
    c.expect(len(np.unique(slots[kept])) == kept.sum(), f"two tokens are written to one slot of {slots.tolist()}")
    _, keys = pool_tags(device, c)
    keys[slots[kept] // c.block_size, slots[kept] % c.block_size] = tags[kept].view(np.uint8).reshape(-1, WORD)
    Rows(device, c.q_out, tokens, c.heads * c.dim * HALF, "q_out").write(tags)


def _sequences(device: DeviceMemory, c: Call, count: int) -> Iterator[tuple[int, int, Tags]]:
    """(first token, tokens, tags of all keys) of each sequence."""
    starts = integers(device, c.cu_query_lens, count + 1)
    lengths = integers(device, c.kv_lens, count)
    table = integers(device, c.table, count * c.table_width).reshape(count, c.table_width)
    c.expect(starts[0] == 0 and (np.diff(starts) >= 0).all(), f"query starts {starts.tolist()}")
    c.expect((lengths >= 0).all() and (lengths <= c.table_width * c.block_size).all(), f"lengths {lengths.tolist()}")
    _, keys = pool_tags(device, c)
    for sequence in range(count):
        length, first = int(lengths[sequence]), int(starts[sequence])
        queries = int(starts[sequence + 1]) - first
        c.expect(length == 0 or queries <= length, f"{queries} queries of a sequence of {length}")
        blocks = table[sequence, : -(-length // c.block_size)]
        c.expect(((blocks >= 0) & (blocks < c.num_blocks)).all(), f"blocks {blocks.tolist()} are not in the pool")
        tags = np.ascontiguousarray(keys[blocks]).view(np.uint32).reshape(-1)[:length]
        yield first, queries, tags


def _attended(device: DeviceMemory, c: Call, count: int, decodes: bool) -> Iterator[tuple[int, int, Tags]]:
    """(sequence, first token, tags of its queries) of sequences with one token, or of those with more."""
    for sequence, (first, queries, tags) in enumerate(_sequences(device, c, count)):
        if (queries == 1) == decodes and queries:
            row = c.heads * c.dim * HALF
            query = Rows(device, c.q + first * row, queries, row, "q").read()
            yield sequence, first, attend(query, tags) if len(tags) else np.zeros(queries, np.uint32)


def _attend_rows(device: DeviceMemory, c: Call, count: int, decodes: bool) -> None:
    row = c.heads * c.dim * HALF
    for _, first, tags in _attended(device, c, count, decodes):
        Rows(device, c.out + first * row, len(tags), row, "out").write(tags)


def decode(device: DeviceMemory, c: Call) -> None:
    _attend_rows(device, c, c.grid[0], decodes=True)


def prefill(device: DeviceMemory, c: Call) -> None:
    _attend_rows(device, c, c.num_sequences, decodes=False)


def decode_split(device: DeviceMemory, c: Call) -> None:
    """The first part has the whole sum."""
    part = (c.padded + 2) * WORD
    for sequence, _, tags in _attended(device, c, c.grid[0], decodes=True):
        parts = Rows(device, c.partial + sequence * c.heads * c.num_splits * part, c.num_splits, part, "partial")
        parts.write(np.array([tags[0], *[0] * (c.num_splits - 1)], np.uint32))


def decode_merge(device: DeviceMemory, c: Call) -> None:
    part, row = (c.padded + 2) * WORD, c.heads * c.dim * HALF
    starts = integers(device, c.cu_query_lens, c.grid[0] + 1)
    for sequence in np.flatnonzero(np.diff(starts) == 1).tolist():
        parts = Rows(device, c.partial + sequence * c.heads * c.num_splits * part, c.num_splits, part, "partial")
        out = Rows(device, c.out + int(starts[sequence]) * row, 1, row, "out")
        out.write(parts.read().sum(dtype=np.uint32, keepdims=True))


def _draw(device: DeviceMemory, c: Call, choices: NDArray[Any]) -> None:
    rows = c.grid[0]
    drawn = draw_rows(floats(device, c.logits, rows, c.vocab), choices)
    integers(device, c.tokens, rows)[:] = np.maximum(drawn, 0)
    integers(device, c.finite, rows)[:] = drawn != NO_TOKEN


def greedy(device: DeviceMemory, c: Call) -> None:
    choices = np.zeros(c.grid[0], CHOICE)
    choices["row"], choices["top_p"] = np.arange(c.grid[0]), 1
    _draw(device, c, choices)


def sample(device: DeviceMemory, c: Call) -> None:
    rows = c.grid[0]
    choices = np.zeros(rows, CHOICE)
    choices["row"] = np.arange(rows)
    for name in ("temperature", "top_p", "min_p", "uniform"):
        choices[name] = floats(device, getattr(c, name), rows)
    choices["top_k"] = integers(device, c.top_k, rows)
    c.expect(((choices["uniform"] >= 0) & (choices["uniform"] < 1)).all(), "a uniform number outside [0, 1)")
    _draw(device, c, choices)


def gather_inputs(device: DeviceMemory, c: Call) -> None:
    count = c.batch
    source, given = integers(device, c.source, count), integers(device, c.given, count)
    lengths = integers(device, c.kv_lens, count)
    table = integers(device, c.table, count * c.table_width).reshape(count, c.table_width)
    live = lengths > 0
    c.expect((lengths[live] < c.table_width * c.block_size).all(), f"lengths {lengths.tolist()}")
    sampled = integers(device, c.sampled, int(source.max(initial=-1)) + 1)
    tokens = np.where(source >= 0, sampled[np.maximum(source, 0)] if len(sampled) else 0, given)
    blocks = np.zeros(count, np.int32)
    blocks[live] = table[np.flatnonzero(live), lengths[live] // c.block_size]
    integers(device, c.input_ids, count)[:] = np.where(live, tokens, 0)
    integers(device, c.positions, count)[:] = np.where(live, lengths, 0)
    integers(device, c.slots, count)[:] = np.where(live, blocks * c.block_size + lengths % c.block_size, -1)
    lengths[live] += 1


STAND_INS = {
    "rope_append": rope_append,
    "decode": decode,
    "decode_split": decode_split,
    "decode_merge": decode_merge,
    "prefill": prefill,
    "greedy": greedy,
    "sample": sample,
    "gather_inputs": gather_inputs,
}
