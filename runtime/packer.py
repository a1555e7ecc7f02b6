"""Plans as batches, where most steps are like the step before: every sequence decodes, and each is one token further.

Such a step's numbers are written over the last one's, in the same arrays. So there is nothing to allocate, block tables
are touched only where they changed, and an executor that reads from where it read last has nothing to copy.
"""

from functools import partial
from struct import Struct

import numpy as np

from castline.plugins.contract import StepTensors
from castline.runtime.batch import StepBatch, block_table, pack
from castline.runtime.decodes import Decodes
from castline.runtime.plan import StepPlan


class StepPacker:
    """Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._arrays: _Arrays | None = None

    def pack(self, plan: StepPlan) -> StepBatch:
        """As `castline.runtime.batch.pack`. Valid until the next call."""
        decodes = Decodes.of(plan.scheduled, self._block_size)
        if decodes is None:
            return pack(plan, self._block_size)
        arrays = self._arrays
        if arrays is None or not arrays.fit(decodes):
            arrays = self._arrays = _Arrays(decodes)
        arrays.write(decodes)
        return arrays.batch


class _Arrays:
    """Of steps in which some sequences decode."""

    def __init__(self, decodes: Decodes) -> None:
        count = len(decodes)
        self._ids_positions = np.empty((2, count), np.int64)
        self._slots_lens = np.empty((2, count), np.int32)
        # NumPy takes longer to read lists.
        self._write_longs = partial(Struct(f"={2 * count}q").pack_into, self._ids_positions.data, 0)
        self._write_ints = partial(Struct(f"={2 * count}i").pack_into, self._slots_lens.data, 0)
        self._seq_ids = decodes.seq_ids
        self._tables = decodes.tables
        self._width = max(map(len, self._tables))
        tensors = StepTensors(
            input_ids=self._ids_positions[0],
            positions=self._ids_positions[1],
            slot_mapping=self._slots_lens[0],
            cu_query_lens=np.arange(count + 1, dtype=np.int32),
            kv_lens=self._slots_lens[1],
            block_table=block_table(self._tables),
            logits_indices=np.arange(count, dtype=np.int64),
        )
        self.batch = StepBatch(tensors, decodes.seq_ids, (), ())

    def fit(self, decodes: Decodes) -> bool:
        """They are of the same sequences, and as wide as their tables."""
        if decodes.seq_ids is not self._seq_ids and decodes.seq_ids != self._seq_ids:
            return False
        tables = decodes.tables
        return tables is self._tables or tables == self._tables or max(map(len, tables)) == self._width

    def write(self, decodes: Decodes) -> None:
        starts, tables = decodes.starts, decodes.tables
        self._write_longs(*decodes.token_ids, *starts)
        self._write_ints(*decodes.slots, *[start + 1 for start in starts])
        if tables is not self._tables and tables != self._tables:  # most are the same objects, which is soon seen
            rows = self.batch.tensors.block_table
            for row, (table, last) in enumerate(zip(tables, self._tables, strict=True)):
                if table is not last:
                    rows[row, : len(table)] = table
                    rows[row, len(table) :] = 0
            self._tables = tables
