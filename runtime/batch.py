"""A plan as the arrays of the step contract, and whose logits the rows are. T tokens, B sequences, R rows of logits."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors
from castline.runtime.plan import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows ``first_row .. first_row + num_rows`` of the logits: a sequence's tokens ``start .. start + num_rows``."""

    seq_id: int
    start: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    tensors: StepTensors
    sample_seq_ids: tuple[int, ...]
    """Sequences that get a token, in the order of the plan."""
    sample_rows: NDArray[np.int64] | None
    """The row of logits of each of them; None when it is every row, in order."""
    prompt_rows: tuple[PromptRows, ...]

    def rows_to_sample(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits if self.sample_rows is None else logits[self.sample_rows]


def build_batch(plan: StepPlan, block_size: int) -> StepBatch:
    """Packs *plan*, which schedules at least one sequence, with no padding of tokens."""
    parts = plan.scheduled
    count = len(parts)
    lens = np.fromiter((len(part.token_ids) for part in parts), np.int32, count)
    starts = np.fromiter((part.start for part in parts), np.int32, count)
    cu_query_lens = np.zeros(count + 1, np.int32)
    np.cumsum(lens, out=cu_query_lens[1:])
    total = int(cu_query_lens[-1])
    owner = np.repeat(np.arange(count, dtype=np.int32), lens)
    positions = np.arange(total, dtype=np.int64) + (starts - cu_query_lens[:-1])[owner]
    block_table = _block_table(parts)
    slots = block_table[owner, positions // block_size] * block_size + positions % block_size
    logits_indices, sample_rows, prompt_rows = _logits_rows(parts, cu_query_lens.tolist())
    tensors = StepTensors(
        input_ids=np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, total),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        cu_query_lens=cu_query_lens,
        kv_lens=starts + lens,
        block_table=block_table,
        logits_indices=np.array(logits_indices, np.int64),
    )
    return StepBatch(
        tensors=tensors,
        sample_seq_ids=tuple(part.seq_id for part in parts if part.samples),
        sample_rows=None if len(sample_rows) == len(logits_indices) else np.array(sample_rows, np.int64),
        prompt_rows=tuple(prompt_rows),
    )


def _block_table(parts: tuple[ScheduledSequence, ...]) -> NDArray[np.int32]:
    """[B, M]; rows are filled up with block 0, which is never read there."""
    lens = np.fromiter((len(part.block_ids) for part in parts), np.int64, len(parts))
    table = np.zeros((len(parts), int(lens.max())), np.int32)
    blocks = np.fromiter(chain.from_iterable(part.block_ids for part in parts), np.int32, int(lens.sum()))
    table[np.arange(table.shape[1]) < lens[:, None]] = blocks
    return table


def _logits_rows(
    parts: tuple[ScheduledSequence, ...], first_token: list[int]
) -> tuple[list[int], list[int], list[PromptRows]]:
    """Packed tokens whose logits are wanted, which of these rows are sampled from, and which belong to prompts."""
    indices: list[int] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    for number, part in enumerate(parts):
        begin, end = first_token[number], first_token[number + 1]
        if part.all_logits:
            prompt_rows.append(PromptRows(part.seq_id, part.start, len(indices), end - begin))
            indices.extend(range(begin, end))
        elif part.samples:
            indices.append(end - 1)
        if part.samples:
            sample_rows.append(len(indices) - 1)
    return indices, sample_rows, prompt_rows
