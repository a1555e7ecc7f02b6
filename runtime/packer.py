"""Plans as batches, where most steps are like the step before: every sequence decodes, and each is one token further.

Such a step's numbers are written over the last one's, in the same arrays. So there is nothing to allocate, block tables
are touched only where they changed, and an executor that reads from where it read last has nothing to copy.
"""

from collections.abc import Sequence
from struct import Struct

import numpy as np

from castline.plugins.contract import StepTensors
from castline.runtime.batch import StepBatch, block_table, pack
from castline.runtime.plan import ScheduledSequence, StepPlan

Pair = tuple[list[int], list[int]]


class StepPacker:
    """Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decodes: _Decodes | None = None

    def pack(self, plan: StepPlan) -> StepBatch:
        """As `castline.runtime.batch.pack`. Valid until the next call."""
        seq_ids: list[int] = []
        tokens: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        slots: list[int] = []
        tables: list[tuple[int, ...]] = []
        size = self._block_size
        for part in plan.scheduled:
            token_ids, start, table = part.token_ids, part.start, part.block_ids
            if len(token_ids) != 1 or not part.samples or part.all_logits:
                return pack(plan, size)
            seq_ids.append(part.seq_id)
            tokens.append(token_ids[0])
            starts.append(start)
            ends.append(start + 1)
            slots.append(table[start // size] * size + start % size)
            tables.append(table)
        decodes = self._decodes
        if decodes is None or not decodes.fits(seq_ids, tables):
            decodes = self._decodes = _Decodes(seq_ids, plan.scheduled)
        decodes.write((tokens, starts), (slots, ends), tables)
        return decodes.batch


class _Decodes:
    """Steps in which some sequences decode."""

    def __init__(self, seq_ids: list[int], parts: Sequence[ScheduledSequence]) -> None:
        count = len(parts)
        self._ids_positions = np.empty((2, count), np.int64)
        self._slots_lens = np.empty((2, count), np.int32)
        self._write_longs = Struct(f"={2 * count}q").pack_into  # NumPy takes longer to read lists
        self._write_ints = Struct(f"={2 * count}i").pack_into
        self._seq_ids = seq_ids
        self._tables = [part.block_ids for part in parts]
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
        self.batch = StepBatch(tensors, tuple(seq_ids), (), ())

    def fits(self, seq_ids: list[int], tables: list[tuple[int, ...]]) -> bool:
        """The arrays are those of these sequences, and as wide as their tables."""
        if seq_ids != self._seq_ids:
            return False
        return tables == self._tables or max(map(len, tables)) == self._width

    def write(self, ids_positions: Pair, slots_lens: Pair, tables: list[tuple[int, ...]]) -> None:
        self._write_longs(self._ids_positions.data, 0, *ids_positions[0], *ids_positions[1])
        self._write_ints(self._slots_lens.data, 0, *slots_lens[0], *slots_lens[1])
        if tables != self._tables:  # most are the same objects, which is soon seen
            rows = self.batch.tensors.block_table
            for row, (table, last) in enumerate(zip(tables, self._tables, strict=True)):
                if table is not last:
                    rows[row, : len(table)] = table
                    rows[row, len(table) :] = 0
            self._tables = tables
