"""Log-probabilities of given tokens under the raw distribution: before temperature, penalties and truncation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from castline.runtime.events import TokenLogprobs
from castline.runtime.top_tokens import top_tokens

LOGPROB_FLOOR = -9999.0
"""Reported for a token of probability 0, so that only finite numbers reach the wire (the OpenAI API does the same)."""

_CHUNK_ROWS = 4
"""Rows weighed at a time: the scratch array stays in cache, and small for the logits of a long prompt."""


def token_logprobs(
    logits: NDArray[np.float32], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry a row of *logits* [rows, vocabulary]: the logprob and rank of ``token_ids[row]``, and
    ``num_top[row]`` best.

    Each row needs a finite maximum and no NaN. Ties rank by token id.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(logits), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        found += _chunk(logits[rows], token_ids[rows], num_top[rows])
    return found


def _chunk(logits: NDArray[np.float32], token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    peak = logits.max(axis=1, keepdims=True)
    shifted = logits - peak
    log_total = peak[:, 0] + np.log(np.exp(shifted, out=shifted).sum(axis=1).astype(np.float64))
    values = logits[np.arange(len(logits)), token_ids]
    top_ids, top_values = top_tokens(logits, min(max(num_top), logits.shape[1]))
    entries = []
    for row, token in enumerate(token_ids):
        before = np.count_nonzero(logits[row] > values[row]) + np.count_nonzero(logits[row, :token] == values[row])
        top = zip(top_ids[row, : num_top[row]], top_values[row, : num_top[row]], strict=True)
        entries.append(
            TokenLogprobs(
                token_id=int(token),
                logprob=_finite(values[row] - log_total[row]),
                rank=int(before) + 1,
                top=tuple((int(i), float(v - log_total[row])) for i, v in top if np.isfinite(v)),
            )
        )
    return entries


def _finite(logprob: np.floating) -> float:
    return max(float(logprob), LOGPROB_FLOOR)
