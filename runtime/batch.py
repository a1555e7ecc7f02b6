"""A plan as the arrays of the step contract, and whose logits the rows are. T tokens, B sequences, R rows of logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors
from castline.runtime.decodes import Decodes
from castline.runtime.plan import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows ``first_row .. first_row + num_rows`` of the logits: a sequence's tokens ``start .. start + num_rows``."""

    seq_id: int
    start: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Row ``first_row + i`` of the logits says what comes after guess ``i`` of a sequence."""

    seq_id: int
    token_ids: tuple[int, ...]
    first_row: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    tensors: StepTensors
    sample_seq_ids: tuple[int, ...]
    """Sequences that get a token, in the order of the plan: the first rows of the logits are theirs, one each."""
    draft_rows: tuple[DraftRows, ...]
    """Of those that guess."""
    prompt_rows: tuple[PromptRows, ...]


def build_batch(plan: StepPlan, block_size: int) -> StepBatch:
    """Packs *plan*, which schedules at least one sequence, with no padding of tokens."""
    decodes = Decodes.of(plan.scheduled, block_size)
    return pack(plan, block_size) if decodes is None else _pack_decodes(decodes)


def _pack_decodes(decodes: Decodes) -> StepBatch:
    """As `pack`, of most steps: each array operation counts then."""
    count = len(decodes)
    tensors = StepTensors(
        input_ids=np.array(decodes.token_ids, np.int64),
        positions=np.array(decodes.starts, np.int64),
        slot_mapping=np.array(decodes.slots, np.int32),
        cu_query_lens=np.arange(count + 1, dtype=np.int32),
        kv_lens=np.array([start + 1 for start in decodes.starts], np.int32),
        block_table=block_table(decodes.tables),
        logits_indices=np.arange(count),
    )
    return StepBatch(tensors, decodes.seq_ids, (), ())


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Any plan."""
    parts = plan.scheduled
    count = len(parts)
    lens = np.fromiter((len(part.token_ids) for part in parts), np.int32, count)
    starts = np.fromiter((part.start for part in parts), np.int32, count)
    cu_query_lens = np.zeros(count + 1, np.int32)
    np.cumsum(lens, out=cu_query_lens[1:])
    total = int(cu_query_lens[-1])
    owner = np.repeat(np.arange(count, dtype=np.int32), lens)
    positions = np.arange(total, dtype=np.int64) + (starts - cu_query_lens[:-1])[owner]
    table = block_table([part.block_ids for part in parts])
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    logits_indices, draft_rows, prompt_rows = _logits_rows(parts, cu_query_lens.tolist())
    tensors = StepTensors(
        input_ids=np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, total),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        cu_query_lens=cu_query_lens,
        kv_lens=starts + lens,
        block_table=table,
        logits_indices=np.array(logits_indices, np.int64),
    )
    return StepBatch(
        tensors=tensors,
        sample_seq_ids=tuple(part.seq_id for part in parts if part.samples),
        draft_rows=draft_rows,
        prompt_rows=prompt_rows,
    )


def block_table(tables: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
    """[B, M]; rows are filled up with block 0, which is never read there."""
    lens = [len(table) for table in tables]
    width = max(lens)
    blocks = np.fromiter(chain.from_iterable(tables), np.int32, sum(lens))
    if min(lens) == width:
        return blocks.reshape(len(tables), width)
    table = np.zeros((len(tables), width), np.int32)
    table[np.arange(width) < np.array(lens)[:, None]] = blocks
    return table


def _logits_rows(
    parts: Sequence[ScheduledSequence], first_token: list[int]
) -> tuple[list[int], tuple[DraftRows, ...], tuple[PromptRows, ...]]:
    """Packed tokens whose logits are wanted: to sample one token each, to check guesses, of prompts, in this order.

    So what is sampled is one piece of memory, whatever else a step has. The last token of a prompt may come twice.
    """
    ends = first_token[1:]
    indices = [end - 1 - part.num_drafts for part, end in zip(parts, ends, strict=True) if part.samples]
    draft_rows: list[DraftRows] = []
    prompt_rows: list[PromptRows] = []
    for part, end in zip(parts, ends, strict=True):
        if part.num_drafts:
            draft_rows.append(DraftRows(part.seq_id, part.token_ids[-part.num_drafts :], len(indices)))
            indices.extend(range(end - part.num_drafts, end))
    for part, end in zip(parts, ends, strict=True):
        if part.all_logits:
            count = len(part.token_ids)
            prompt_rows.append(PromptRows(part.seq_id, part.start, len(indices), count))
            indices.extend(range(end - count, end))
    return indices, tuple(draft_rows), tuple(prompt_rows)
