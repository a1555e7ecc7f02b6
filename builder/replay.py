"""Feeds known token sequences to an engine the way serving does: packed, chunked, interleaved, over scattered blocks.

This is not a scheduler: every sequence has its blocks from the start, and none ever waits. It is here so that parity is
measured through the paged pool, with chunk borders that fall inside blocks and with prefill and decode in one step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from castline.engines.capacity import blocks_for
from castline.engines.manifest import Limits
from castline.plugins.contract import StepTensors

CHUNK_SIZES = (7, 1, 33, 16, 1, 64, 3, 48)
"""Tokens that a sequence is fed, step after step; each sequence starts at another place of the cycle."""
DECODE = (1,)
"""Chunk sizes of sequences that only decode."""


@dataclass(slots=True)
class Track:
    """One sequence on its way through the engine."""

    tokens: list[int]
    blocks: list[int]
    """Physical blocks, logical order."""
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits rows of a step that belong to one sequence: those of its tokens ``start .. stop - 1``."""

    sequence: int
    start: int
    stop: int


def make_tracks(sequences: Sequence[Sequence[int]], block_size: int, reserve: int = 0, seed: int = 0) -> list[Track]:
    """A track for each sequence, with room for *reserve* tokens more, over blocks dealt out in random order."""
    needs = [blocks_for(len(tokens) + reserve, block_size) for tokens in sequences]
    shuffled = np.random.default_rng(seed).permutation(sum(needs)).tolist()
    tracks = []
    for tokens, need in zip(sequences, needs, strict=True):
        tracks.append(Track(list(tokens), shuffled[:need]))
        del shuffled[:need]
    return tracks


def blocks_needed(sequences: Sequence[Sequence[int]], block_size: int, reserve: int = 0) -> int:
    """Blocks of the pool that `make_tracks` deals out."""
    return sum(blocks_for(len(tokens) + reserve, block_size) for tokens in sequences)


def replay(
    tracks: Sequence[Track], limits: Limits, chunk_sizes: Sequence[int] = CHUNK_SIZES
) -> Iterator[tuple[StepTensors, list[Rows]]]:
    """Steps that feed every track to its end, all logits wanted; within the engine's limits on a step."""
    turn = 0
    while any(track.num_computed < len(track.tokens) for track in tracks):
        rows: list[Rows] = []
        budget = limits.max_num_batched_tokens
        for index, track in enumerate(tracks):
            size = chunk_sizes[(turn + 3 * index) % len(chunk_sizes)]
            size = min(size, len(track.tokens) - track.num_computed, budget)
            if size and len(rows) < limits.max_num_seqs:
                rows.append(Rows(index, track.num_computed, track.num_computed + size))
                budget -= size
        yield step_of(tracks, rows, limits.block_size), rows
        for row in rows:
            tracks[row.sequence].num_computed = row.stop
        turn += 1


def step_of(tracks: Sequence[Track], rows: Sequence[Rows], block_size: int, *, last_only: bool = False) -> StepTensors:
    """The packed tensors of one step; logits of all its tokens, or of each sequence's last."""
    positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
    table = np.zeros((len(rows), max(len(tracks[row.sequence].blocks) for row in rows)), np.int32)
    ids: list[int] = []
    slots: list[int] = []
    for line, row in enumerate(rows):
        track = tracks[row.sequence]
        table[line, : len(track.blocks)] = track.blocks
        ids += track.tokens[row.start : row.stop]
        slots += [track.blocks[p // block_size] * block_size + p % block_size for p in range(row.start, row.stop)]
    cu_query_lens = np.cumsum([0] + [row.stop - row.start for row in rows]).astype(np.int32)
    wanted = cu_query_lens[1:] - 1 if last_only else np.arange(len(ids))
    return StepTensors(
        input_ids=np.array(ids, np.int64),
        positions=positions.astype(np.int64),
        slot_mapping=np.array(slots, np.int32),
        cu_query_lens=cu_query_lens,
        kv_lens=np.array([row.stop for row in rows], np.int32),
        block_table=table,
        logits_indices=wanted.astype(np.int64),
    )
