"""Logits to tokens, for a whole batch at once.

Every sequence has its own state, so a batch may hold any mix in any order, and preemption loses nothing. What does not
change from step to step (whose rows they are, and how each is drawn) is kept while the batch stays the same. Options
that edit logits do so in place, at the few tokens they concern, and are undone; no row is copied.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError, ErrorCode
from castline.plugins.cpu.sampling import CHOICE, NO_TOKEN, RowDraws
from castline.runtime.draw import take_rows
from castline.runtime.events import TokenLogprobs
from castline.runtime.logits import LogitEdits
from castline.runtime.logprobs import token_logprobs
from castline.runtime.randomness import UniformStream
from castline.runtime.sampler_api import UNSOUND_LOGITS, BrokenLogits, SampleResult
from castline.runtime.sampling_params import SamplingParams

Logits = NDArray[np.float32]
DrawRows = Callable[[Logits, NDArray[Any], Logits | None], list[int]]
"""Logits, choices, maxima (`castline.plugins.cpu.sampling.RowDraws`)."""

_MOST_BATCHES = 4
_TABLE_STEPS = 16
"""Steps whose random numbers are gathered at once."""


class _Sequence:
    """What the sampler remembers of one sequence."""

    __slots__ = ("edits", "num_generated", "params", "uniforms")

    def __init__(self, params: SamplingParams, edits: LogitEdits | None, uniforms: UniformStream) -> None:
        self.params = params
        self.edits = edits
        """None where no option ever edits its logits."""
        self.uniforms = uniforms
        self.num_generated = 0
        """Counted where it matters: for random numbers and edits."""


class _Batch:
    """Sequences that are sampled together, row by row."""

    def __init__(self, sequences: list[_Sequence]) -> None:
        self.sequences = sequences
        self.drawn = [seq for seq in sequences if not seq.params.greedy]
        self.edited = [(row, seq, seq.edits) for row, seq in enumerate(sequences) if seq.edits is not None]
        self.logprob_rows = [row for row, seq in enumerate(sequences) if seq.params.logprobs is not None]
        params = [seq.params for seq in sequences]
        self._counted = [seq for seq in sequences if seq.edits is not None or not seq.params.greedy]
        self.choices = np.zeros(len(sequences), CHOICE)
        self.choices["row"] = np.arange(len(sequences))
        self.choices["temperature"] = [0.0 if p.greedy else p.temperature for p in params]
        self.choices["top_k"] = [max(p.top_k, 0) for p in params]
        self.choices["top_p"] = [p.top_p for p in params]
        self.choices["min_p"] = [p.min_p for p in params]
        self.logits: Logits | None = None
        """The last step's array."""
        self._uniforms = self.choices["uniform"]
        drawn_rows = [row for row, seq in enumerate(sequences) if not seq.params.greedy]
        self._drawn_rows = slice(None) if len(drawn_rows) == len(sequences) else drawn_rows
        self._table: NDArray[np.float64] | None = None
        """[steps, drawn]: numbers of the next steps. None while others may get tokens between this batch's."""
        self._step = 0
        """Tokens of each since the table was made."""

    def resume(self) -> None:
        """Another batch was sampled since the last time: its sequences may be some of these."""
        self._table = None
        self._step = 0

    def next_choices(self, ahead: int = 0) -> NDArray[Any]:
        """For the next token of each, or *ahead* tokens after it."""
        if self.drawn:
            self._uniforms[self._drawn_rows] = self._next_uniforms(ahead)
        return self.choices

    def _next_uniforms(self, ahead: int) -> NDArray[np.float64] | list[float]:
        step = self._step + ahead
        if self._table is None or step >= len(self._table):
            if self._step == 0:
                return [seq.uniforms.at(seq.num_generated + ahead) for seq in self.drawn]
            self._table = np.array([seq.uniforms.run(seq.num_generated, _TABLE_STEPS) for seq in self.drawn]).T.copy()
            self._step, step = 0, ahead
        numbers: NDArray[np.float64] = self._table[step]
        return numbers

    def record(self, tokens: Sequence[int]) -> None:
        for seq in self._counted:
            seq.num_generated += 1
        for row, _, edits in self.edited:
            edits.append(tokens[row])
        self._step += 1


class Sampler:
    """Not thread-safe: the engine loop owns it. Parameters were validated at the edge."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
        draw: DrawRows | None = None,
        num_threads: int = 1,
    ) -> None:
        """*entropy* gives the seed of each sequence whose request has none. *draw* is native, on up to *num_threads*
        threads, unless a test says.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._entropy = entropy
        self._draw = draw or RowDraws(num_threads)
        self._sequences: dict[int, _Sequence] = {}
        self._batches: dict[tuple[int, ...], _Batch] = {}
        """The last few by their keys: steps with guesses alternate between all sequences and those that guess."""
        self._last: tuple[tuple[int, ...], _Batch] | None = None

    def __len__(self) -> int:
        """Sequences it holds state for."""
        return len(self._sequences)

    def add(self, seq_key: int, params: SamplingParams, prompt_token_ids: Sequence[int], index: int) -> None:
        """A new sequence: continuation *index* of its request. Its key must not be in use."""
        assert seq_key not in self._sequences, f"sequence {seq_key} was added before"
        seed = self._entropy() if params.seed is None else params.seed
        edits = LogitEdits(params, prompt_token_ids, self._eos_token_ids)
        self._sequences[seq_key] = _Sequence(params, edits if edits.any else None, UniformStream(seed, index))

    def remove(self, seq_key: int) -> None:
        """Forgets a sequence; unknown keys are ignored."""
        if self._sequences.pop(seq_key, None) is not None:
            self._batches.clear()  # the key may come again
            self._last = None

    def sample(self, logits: Logits, seq_keys: Sequence[int], maxima: Logits | None = None) -> SampleResult:
        """Chooses and records the next token of each sequence from its row of *logits* [rows, vocabulary].

        *maxima* are those of the rows, where they are known. The logits are on return what they were.

        Raises BrokenLogits, having recorded nothing, if any row has no token to choose.
        """
        batch = self._batch_of(tuple(seq_keys))
        if logits is not batch.logits:  # most steps write the logits of a batch where they wrote the last
            assert logits.shape == (len(seq_keys), self._vocab_size), (logits.shape, len(seq_keys), self._vocab_size)
            batch.logits = logits
        if batch.edited:
            logits = logits if logits.flags.writeable else logits.copy()
            with _edited(logits, batch):
                tokens = self._draw(logits, batch.next_choices(), None)  # edits may have changed any maximum
        else:
            tokens = self._draw(logits, batch.next_choices(), maxima)
        if NO_TOKEN in tokens:
            raise _broken(logits, tokens, seq_keys)
        logprobs = _logprobs(logits, tokens, batch) if batch.logprob_rows else []
        batch.record(tokens)
        return SampleResult(tokens, logprobs)

    def wants_logits(self, seq_keys: Sequence[int], ahead: int = 0) -> list[int]:
        """See `castline.runtime.sampler_api.Sampler`."""
        batch = self._batch_of(tuple(seq_keys))
        edited = [row for row, seq, edits in batch.edited if edits.active(seq.num_generated + ahead)]
        return sorted({*edited, *batch.logprob_rows})

    def choices(self, seq_keys: Sequence[int], ahead: int = 0) -> NDArray[Any]:
        return self._batch_of(tuple(seq_keys)).next_choices(ahead)

    def record(self, seq_keys: Sequence[int], token_ids: Sequence[int]) -> None:
        self._batch_of(tuple(seq_keys)).record(token_ids)

    def _batch_of(self, seq_keys: tuple[int, ...]) -> _Batch:
        if self._last is not None and self._last[0] is seq_keys:  # most steps
            return self._last[1]
        batch = self._batches.get(seq_keys)
        if batch is None:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[seq_keys] = _Batch([self._sequences[key] for key in seq_keys])
        if self._last is None or self._last[1] is not batch:
            batch.resume()
        self._last = seq_keys, batch
        return batch

    def prompt_logprobs(self, logits: Logits, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """One entry a row of *logits* [rows, vocabulary]: how likely the prompt's own next token was.

        Raises EngineError for NaN or infinite logits.
        """
        if not np.isfinite(logits.max(axis=1)).all():
            raise EngineError("the step gave NaN or infinite logits for a prompt token")
        return token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))


@contextmanager
def _edited(logits: Logits, batch: _Batch) -> Iterator[None]:
    """The logits as the sequences' options want them, within the block."""
    saved: list[tuple[int, NDArray[np.int64], Logits]] = []
    for row, seq, edits in batch.edited:
        if edits.active(seq.num_generated):
            ids = edits.touched(seq.num_generated)
            saved.append((row, ids, logits[row, ids]))
            edits.apply(logits[row], seq.num_generated)
    try:
        yield
    finally:
        for row, ids, values in saved:
            logits[row, ids] = values


def _broken(logits: Logits, tokens: Sequence[int], seq_keys: Sequence[int]) -> BrokenLogits:
    """The engine's faults first: rows that its logits leave no token. The others are broken by their own options."""
    rows = [row for row, token in enumerate(tokens) if token == NO_TOKEN]
    unsound = [row for row in rows if not np.isfinite(logits[row].max())]
    if unsound:
        return BrokenLogits({seq_keys[row]: UNSOUND_LOGITS for row in unsound}, ErrorCode.ENGINE_FAILED)
    reason = "logit_bias and min_tokens leave no token to choose"
    return BrokenLogits({seq_keys[row]: reason for row in rows}, ErrorCode.INVALID_VALUE)


def _logprobs(logits: Logits, tokens: Sequence[int], batch: _Batch) -> list[TokenLogprobs | None]:
    """Of the raw logits, for the rows that asked."""
    wanted = batch.logprob_rows
    result: list[TokenLogprobs | None] = [None] * len(tokens)
    num_top = [batch.sequences[row].params.logprobs or 0 for row in wanted]
    entries = token_logprobs(take_rows(logits, wanted), [tokens[row] for row in wanted], num_top)
    for row, entry in zip(wanted, entries, strict=True):
        result[row] = entry
    return result
