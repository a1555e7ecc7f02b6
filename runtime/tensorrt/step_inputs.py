"""A step's arrays as one piece of memory, which one copy brings to the device.

Every array has elements of 4 bytes and begins at a multiple of `ALIGNMENT`. The block table comes last, so that what
it has no rows for need not be copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    INPUT_IDS,
    KV_LENS,
    LOGITS_INDICES,
    POSITIONS,
    SLOT_MAPPING,
    StepTensors,
)

ALIGNMENT: Final = 256
ITEM_BYTES: Final = 4
SOURCE: Final = "source"
GIVEN: Final = "given"
"""Of the kernel ``gather_inputs``."""
DRAW_OPTIONS: Final = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Of the kernel ``sample``, one of each a row."""

NO_SEQUENCES: Final = StepTensors(
    input_ids=np.zeros(0, np.int64),
    positions=np.zeros(0, np.int64),
    slot_mapping=np.zeros(0, np.int32),
    cu_query_lens=np.zeros(1, np.int32),
    kv_lens=np.zeros(0, np.int32),
    block_table=np.zeros((0, 1), np.int32),
    logits_indices=np.zeros(0, np.int64),
)

Packed = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """T, B, M and R of a step as the device computes it."""

    tokens: int
    sequences: int
    table_width: int
    rows: int
    drawn: int
    """Rows from the first on that have options of drawing."""
    gathered: int = 0
    """Sequences whose tokens may come from the step before."""


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where each array lies, in bytes from the start."""

    sizes: StepSizes
    offsets: dict[str, int]
    counts: dict[str, int]
    """Elements."""
    total: int

    @classmethod
    def of(cls, sizes: StepSizes) -> "InputLayout":
        counts = {
            **dict.fromkeys((INPUT_IDS, POSITIONS, SLOT_MAPPING), sizes.tokens),
            CU_QUERY_LENS: sizes.sequences + 1,
            KV_LENS: sizes.sequences,
            LOGITS_INDICES: sizes.rows,
            **dict.fromkeys((SOURCE, GIVEN), sizes.gathered),
            **dict.fromkeys(DRAW_OPTIONS, sizes.drawn),
            BLOCK_TABLE: sizes.sequences * sizes.table_width,
        }
        offsets, end = {}, 0
        for name, count in counts.items():
            offsets[name] = end
            end += -(-count * ITEM_BYTES // ALIGNMENT) * ALIGNMENT
        return cls(sizes, offsets, counts, end)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the plan's inputs."""
        sizes = self.sizes
        names = (INPUT_IDS, POSITIONS, SLOT_MAPPING, CU_QUERY_LENS, KV_LENS, LOGITS_INDICES)
        return {
            **{name: (self.counts[name],) for name in names},
            BLOCK_TABLE: (sizes.sequences, sizes.table_width),
        }

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The arrays, int32 or float32, in *memory*, whose bytes are from the layout's start on."""
        return {name: self._view(memory, name) for name in self.offsets}

    def used_bytes(self, table_rows: int) -> int:
        """Without the table's rows after the first *table_rows*."""
        return self.offsets[BLOCK_TABLE] + table_rows * self.sizes.table_width * ITEM_BYTES

    def _view(self, memory: NDArray[np.uint8], name: str) -> NDArray[Any]:
        offset = self.offsets[name]
        dtype = np.float32 if name in DRAW_OPTIONS and name != "top_k" else np.int32
        return memory[offset : offset + self.counts[name] * ITEM_BYTES].view(dtype)


def pack_mixed(into: Packed, tensors: StepTensors, indices: NDArray[np.int64]) -> None:
    """A step as it is, but for its rows of logits, which are those of the tokens *indices*."""
    for name, values in tensors.feeds().items():
        into[name][:] = indices if name == LOGITS_INDICES else values.reshape(-1)


def pack_decode(into: Packed, tensors: StepTensors, sizes: StepSizes, source: NDArray[np.int32] | None) -> None:
    """A step of one token a sequence, filled up with sequences of length 0, whose tokens are written nowhere.

    Such a row reads no key and appends none, so no KV block is set apart for it. Every sequence has its row of logits,
    in order. With *source* [B], rows of the last tokens or -1, the kernel ``gather_inputs`` completes the step: it is
    given the lengths before the step, and makes ids, positions and slots.
    """
    count, padded = len(tensors.kv_lens), sizes.sequences
    _fill(into[INPUT_IDS], tensors.input_ids, 0)
    _fill(into[POSITIONS], tensors.positions, 0)
    _fill(into[SLOT_MAPPING], tensors.slot_mapping, -1)
    into[CU_QUERY_LENS][:] = np.arange(padded + 1)
    into[LOGITS_INDICES][:] = np.arange(padded)
    _fill(into[KV_LENS], tensors.kv_lens if source is None else tensors.kv_lens - 1, 0)
    if source is not None:
        _fill(into[SOURCE], source, -1)
        _fill(into[GIVEN], tensors.input_ids, 0)
    width = tensors.block_table.shape[1]
    into[BLOCK_TABLE].reshape(padded, sizes.table_width)[:count, :width] = tensors.block_table


def _fill(into: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    into[: len(values)] = values
    into[len(values) :] = padding
