"""The tokens of a step: one for each sequence that samples, and more for those whose guesses are right.

A guess is checked by sampling: the sequence's own sampler, with its penalties, its bans and the random number of that
position, chooses a token from the logits that the guessed tokens give. While it chooses the guessed ones, the next
row is the one that it would have had anyway. So the tokens are those of a run without guesses, greedy or not, and a row
after the first wrong guess is never looked at.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from castline.runtime.batch import DraftRows, StepBatch
from castline.runtime.events import TokenLogprobs
from castline.runtime.one_token import OneToken
from castline.runtime.sampler_api import BrokenLogits, Sampler, SampleResult

Logits = NDArray[np.float32]

_log = logging.getLogger(__name__)


class StepSamples(msgspec.Struct):
    """By seq_id."""

    token_ids: Mapping[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """At least one for each sequence that samples, unless it is broken."""
    logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    """One for each token, of the sequences that asked."""
    broken: dict[int, BrokenLogits] = msgspec.field(default_factory=dict)
    """Sequences that cannot have another token."""

    def add(self, seq_ids: Sequence[int], token_ids: list[int]) -> None:
        """One more token for each of *seq_ids*."""
        earlier = self.token_ids
        if not earlier:
            self.token_ids = OneToken(tuple(seq_ids), token_ids)
            return
        added = zip(seq_ids, zip(token_ids), strict=True)
        self.token_ids = {**earlier, **{seq_id: earlier.get(seq_id, ()) + token for seq_id, token in added}}


class Rows(msgspec.Struct, frozen=True):
    """Rows of logits [R, V], and their maxima [R, blocks] where the executor gives them."""

    logits: Logits
    maxima: Logits | None

    def first(self, count: int) -> "Rows":
        """The same arrays, where they are all: most steps' rows."""
        if count == len(self.logits):
            return self
        return Rows(self.logits[:count], None if self.maxima is None else self.maxima[:count])

    def take(self, rows: Sequence[int]) -> "Rows":
        """Without a copy for a single row, which is what a lone sequence has."""
        index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        return Rows(self.logits[index], None if self.maxima is None else self.maxima[index])


def sample_step(sampler: Sampler, batch: StepBatch, all_rows: Rows) -> StepSamples:
    """Raises what the sampler raises for the first token of each sequence, and then it has recorded nothing."""
    samples = StepSamples()
    seq_ids = batch.sample_seq_ids
    sample_rows(sampler, samples, all_rows.first(len(seq_ids)), seq_ids)
    if not batch.draft_rows:
        return samples
    depth = 0
    while guesses := [guess for guess in batch.draft_rows if _is_right(guess, samples, depth)]:
        rows = [guess.first_row + depth for guess in guesses]
        try:
            sample_rows(sampler, samples, all_rows.take(rows), [guess.seq_id for guess in guesses])
        except Exception:
            # The tokens so far are recorded and right. What is wrong here shows again in a step that can be undone.
            _log.warning("a guess could not be checked", exc_info=True)
            break
        depth += 1
    return samples


def _is_right(guess: DraftRows, samples: StepSamples, depth: int) -> bool:
    """The sequence has been given its guessed tokens so far, and token *depth* of the guess was the latest."""
    tokens = samples.token_ids.get(guess.seq_id, ())
    return (
        depth < len(guess.token_ids)
        and len(tokens) == depth + 1
        and tokens[depth] == guess.token_ids[depth]
        and guess.seq_id not in samples.broken
    )


def sample_rows(sampler: Sampler, samples: StepSamples, rows: Rows, seq_ids: Sequence[int]) -> None:
    """One more token for each of *seq_ids*, from its row, but for those that cannot have one."""
    while seq_ids:
        try:
            result = sampler.sample(rows.logits, seq_ids, rows.maxima)
        except BrokenLogits as error:
            samples.broken |= dict.fromkeys(error.reasons, error)
            kept = [row for row, seq_id in enumerate(seq_ids) if seq_id not in error.reasons]
            if kept:
                rows = rows.take(kept)
            seq_ids = [seq_ids[row] for row in kept]
        else:
            _keep(samples, result, seq_ids)
            return


def _keep(samples: StepSamples, result: SampleResult, seq_ids: Sequence[int]) -> None:
    samples.add(seq_ids, result.token_ids)
    if result.logprobs:
        for seq_id, logprobs in zip(seq_ids, result.logprobs, strict=True):
            if logprobs is not None:
                samples.logprobs.setdefault(seq_id, []).append(logprobs)
