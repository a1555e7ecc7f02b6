"""Repetition, presence and frequency penalties of one sequence, as sparse edits of its logits.

Repetition (CTRL, Keskar et al. 2019) divides a positive logit and multiplies a negative one, for every token of the
prompt and of the text so far. Presence and frequency (OpenAI API) are subtracted for generated tokens only: once,
and for each occurrence.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from castline.runtime.sampling_params import SamplingParams


class _TokenCounts:
    """Distinct token ids with how often each came, as arrays that grow by doubling."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}
        self._ids = ids
        self._counts = counts.astype(np.float32)

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._slots)]


class Penalties:
    """What one sequence has seen, and what that does to its next logits."""

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._seen = _TokenCounts(prompt_token_ids if params.repetition_penalty != 1 else ())
        self._generated = _TokenCounts()

    def append(self, token_id: int) -> None:
        """A token was generated."""
        self._generated.append(token_id)
        if self._repetition != 1:
            self._seen.append(token_id)

    def touched(self) -> NDArray[np.int64]:
        """Ids of the tokens whose logits `apply` changes."""
        return self._seen.ids if self._repetition != 1 else self._generated.ids

    def apply(self, row: NDArray[np.float32]) -> None:
        """Edits the logits [vocabulary] of the next token in place."""
        if self._repetition != 1:
            ids = self._seen.ids
            values = row[ids]
            row[ids] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._presence != 0 or self._frequency != 0:
            row[self._generated.ids] -= self._presence + self._frequency * self._generated.counts
