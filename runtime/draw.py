"""A token from each row's distribution, by inverting its cumulative distribution at one uniform number a row.

The reference of castline.plugins.cpu.sampling, which does the same in native code and is what serves.

One number a row, and arithmetic that never mixes rows: a row's token does not depend on its neighbours. Truncation
goes in the order of transformers and llama.cpp: temperature, top-k, top-p (of what top-k left), min-p. Each keeps a
prefix of the tokens in order of likelihood, so only the head of the vocabulary has to be put in order, and it is
widened when too short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.cpu.sampling import NO_TOKEN
from castline.runtime.top_tokens import top_values

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]

_CHUNK_ROWS = 4
"""Rows weighed at a time, so that the scratch array stays in cache."""
_BLOCK = 256
_FIRST_HEAD = 64
_HEAD_GROWTH = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """How each of the rows is to be drawn: arrays of one element a row."""

    temperature: Floats
    top_k: NDArray[np.int64]
    """0: off."""
    top_p: Floats
    min_p: Floats
    uniform: Floats
    """In [0, 1)."""

    def of(self, rows: NDArray[Any]) -> "Choice":
        return Choice(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])

    @property
    def truncated(self) -> NDArray[np.bool_]:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def draw_rows(logits: Logits, choices: NDArray[Any]) -> NDArray[np.int64]:
    """As `castline.plugins.cpu.sampling.draw_rows`, which describes the arguments."""
    rows = logits[choices["row"]]
    tokens: NDArray[np.int64] = rows.argmax(axis=1)
    peak = rows[np.arange(len(rows)), tokens]
    sound = np.isfinite(peak)  # argmax stops at a NaN, so such a row has no NaN and no +infinity
    drawn = np.flatnonzero(sound & (choices["temperature"] > 0))
    if drawn.size:
        part = choices[drawn]
        choice = Choice(*(part[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform")))
        tokens[drawn] = draw(take_rows(rows, drawn), peak[drawn], choice)
    tokens[~sound] = NO_TOKEN
    return tokens


def draw(logits: Logits, peak: Logits, choice: Choice) -> NDArray[np.int64]:
    """One token id a row. *logits* [rows, vocabulary] holds no NaN; *peak* [rows], each row's largest, is finite."""
    truncated = choice.truncated
    tokens = np.empty(len(logits), dtype=np.int64)
    for rows, draw_rows in ((np.flatnonzero(truncated), _draw_truncated), (np.flatnonzero(~truncated), _draw_full)):
        if rows.size:
            tokens[rows] = draw_rows(take_rows(logits, rows), peak[rows], choice.of(rows))
    return tokens


def take_rows(logits: Logits, rows: Sequence[int] | NDArray[np.int64]) -> Logits:
    """Some rows, each at most once and in order; copied unless they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _weights(logits: Logits, peak: Logits, temperature: Floats) -> Logits:
    """Unnormalised probabilities; the most likely token weighs 1."""
    weights = logits - peak[:, None]
    weights *= (1 / temperature).astype(np.float32)[:, None]
    np.exp(weights, out=weights)
    return weights


def _draw_full(logits: Logits, peak: Logits, choice: Choice) -> NDArray[np.int64]:
    tokens = np.empty(len(logits), dtype=np.int64)
    for start in range(0, len(logits), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        weights = _weights(logits[rows], peak[rows], choice.temperature[rows])
        tokens[rows] = _invert(weights, choice.uniform[rows])
    return tokens


def _invert(weights: Logits, uniform: Floats) -> NDArray[np.int64]:
    """First the block of the vocabulary in which the cumulative weight passes uniform x total, then the token
    inside.
    """
    vocab = weights.shape[1]
    starts = np.arange(0, vocab, _BLOCK)
    block_cum = np.cumsum(np.add.reduceat(weights, starts, axis=1), axis=1, dtype=np.float64)
    target = uniform * block_cum[:, -1]
    block = _first_above(block_cum, target)
    before = np.where(block > 0, np.take_along_axis(block_cum, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    ids = starts[block][:, None] + np.arange(_BLOCK)
    inside = np.where(ids < vocab, np.take_along_axis(weights, np.minimum(ids, vocab - 1), axis=1), 0.0)
    return starts[block] + _first_above(np.cumsum(inside, axis=1, dtype=np.float64), target - before)


def _first_above(cumulative: Floats, target: Floats) -> NDArray[np.int64]:
    """Index of the first cumulative weight above the target; rounding never leads past the last element with weight."""
    first = np.count_nonzero(cumulative <= target[:, None], axis=1)
    last = np.argmax(cumulative >= cumulative[:, -1:], axis=1)
    at: NDArray[np.int64] = np.minimum(first, last)
    return at


def _draw_truncated(logits: Logits, peak: Logits, choice: Choice) -> NDArray[np.int64]:
    vocab = logits.shape[1]
    total = _total_weight(logits, peak, choice)
    tokens = np.empty(len(logits), dtype=np.int64)
    pending, width = np.arange(len(logits)), _FIRST_HEAD
    while pending.size:
        width = min(width, vocab)
        wanted = choice.of(pending)
        values = top_values(take_rows(logits, pending), width)
        weights = np.exp((values - peak[pending, None]) / wanted.temperature[:, None])
        kept, complete = truncate(weights, total[pending], vocab, wanted)
        cumulative = np.cumsum(np.where(kept, weights, 0.0), axis=1)
        at = _first_above(cumulative, wanted.uniform * cumulative[:, -1])
        for place in np.flatnonzero(complete):
            row = pending[place]
            tokens[row] = _token_at(logits[row], values[place], int(at[place]))
        pending, width = pending[~complete], width * _HEAD_GROWTH
    return tokens


def _token_at(row: Logits, descending: Logits, position: int) -> int:
    """The token at a position of the order: among equal logits, the lower id comes first."""
    value = descending[position]
    ties_before = np.count_nonzero(descending[:position] == value)
    return int(np.flatnonzero(row == value)[ties_before])


def _total_weight(logits: Logits, peak: Logits, choice: Choice) -> Floats:
    """Weight of the whole vocabulary, for the rows that measure top-p against it; 0 for the others."""
    total = np.zeros(len(logits))
    rows = np.flatnonzero((choice.top_p < 1) & (choice.top_k == 0))
    for start in range(0, rows.size, _CHUNK_ROWS):
        part = rows[start : start + _CHUNK_ROWS]
        weights = _weights(take_rows(logits, part), peak[part], choice.temperature[part])
        total[part] = weights.sum(axis=1)
    return total


def truncate(
    weights: Floats, total: Floats, vocab_size: int, choice: Choice
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens of a head the options keep: (kept [rows, width], complete [rows]).

    *weights* [rows, width] are those of the most likely tokens, descending, the first being 1; *total* is the
    weight of the vocabulary for rows with top-p and no top-k. A row is complete if no token outside the head can be
    kept.
    """
    rows, width = weights.shape
    limit = np.where(choice.top_k > 0, choice.top_k, vocab_size)
    within_k = np.arange(width) < limit[:, None]
    cumulative = np.cumsum(np.where(within_k, weights, 0.0), axis=1)
    total = np.where(choice.top_k > 0, cumulative[:, -1], total)
    # A token is kept while those before it do not yet reach top-p: the one that crosses the line is the last.
    before = np.concatenate([np.zeros((rows, 1)), cumulative[:, :-1]], axis=1)
    within_p = (choice.top_p >= 1)[:, None] | (before < (choice.top_p * total)[:, None])
    kept = within_k & within_p & (weights >= choice.min_p[:, None])
    reaches_p = (choice.top_p < 1) & (cumulative[:, -1] >= choice.top_p * total)
    reaches_end = (choice.top_k == 0) & (reaches_p | (weights[:, -1] < choice.min_p))
    complete = (width == vocab_size) | (width >= limit) | reaches_end
    return kept, complete
