"""Plans as batches, where most steps are like the step before: every sequence decodes, and each is one token further.

Such a step's numbers are written over the last one's, in the same arrays. So there is nothing to allocate, block tables
are touched only where they changed, and an executor that reads from where it read last has nothing to copy.
"""

from collections.abc import Sequence

import numpy as np

from castline.plugins.contract import StepTensors
from castline.runtime.batch import StepBatch, block_table, pack
from castline.runtime.plan import ScheduledSequence, StepPlan


class StepPacker:
    """Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decodes: _Decodes | None = None

    def pack(self, plan: StepPlan) -> StepBatch:
        """As `castline.runtime.batch.pack`. Valid until the next call."""
        seq_ids, tokens, starts, slots, tables = [], [], [], [], []
        size = self._block_size
        for part in plan.scheduled:
            token_ids, start, table = part.token_ids, part.start, part.block_ids
            if len(token_ids) != 1 or not part.samples or part.all_logits:
                return pack(plan, size)
            seq_ids.append(part.seq_id)
            tokens.append(token_ids[0])
            starts.append(start)
            slots.append(table[start // size] * size + start % size)
            tables.append(table)
        decodes = self._decodes
        if decodes is None or not decodes.fits(seq_ids, tables):
            decodes = self._decodes = _Decodes(seq_ids, plan.scheduled)
        decodes.write(tokens, starts, slots, tables)
        return decodes.batch


class _Decodes:
    """Steps in which some sequences decode."""

    def __init__(self, seq_ids: list[int], parts: Sequence[ScheduledSequence]) -> None:
        count = len(parts)
        self._seq_ids = seq_ids
        self._tables = [part.block_ids for part in parts]
        self._width = max(map(len, self._tables))
        tensors = StepTensors(
            input_ids=np.empty(count, np.int64),
            positions=np.empty(count, np.int64),
            slot_mapping=np.empty(count, np.int32),
            cu_query_lens=np.arange(count + 1, dtype=np.int32),
            kv_lens=np.empty(count, np.int32),
            block_table=block_table(self._tables),
            logits_indices=np.arange(count, dtype=np.int64),
        )
        self.batch = StepBatch(tensors, tuple(seq_ids), (), ())

    def fits(self, seq_ids: list[int], tables: list[tuple[int, ...]]) -> bool:
        """The arrays are those of these sequences, and as wide as their tables."""
        if seq_ids != self._seq_ids:
            return False
        return tables == self._tables or max(map(len, tables)) == self._width

    def write(self, tokens: list[int], starts: list[int], slots: list[int], tables: list[tuple[int, ...]]) -> None:
        tensors = self.batch.tensors
        tensors.input_ids[:] = tokens
        tensors.positions[:] = starts
        np.add(tensors.positions, 1, out=tensors.kv_lens, casting="same_kind")
        tensors.slot_mapping[:] = slots
        if tables != self._tables:  # most are the same objects, which is soon seen
            for row, (table, last) in enumerate(zip(tables, self._tables, strict=True)):
                if table is not last:
                    tensors.block_table[row, : len(table)] = table
                    tensors.block_table[row, len(table) :] = 0
            self._tables = tables
